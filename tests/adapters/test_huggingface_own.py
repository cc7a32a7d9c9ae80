"""A user's own attention or mask function, whatever way it comes to stand under the model's name, is not replaced."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.inspection import foreign
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import sparseprefill as sp
from helpers import hf_models

LONG, NEAR = 200, 100
"""Tokens of a prompt, and how many keys the windows below let through: more than a dry run has."""
eager = modeling_llama.eager_attention_forward


def _keep(queries: int, keys: int) -> torch.Tensor:
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    return ((j <= i) & (j > i - NEAR))[None, None]


def windowed(module: Any, q: Any, k: Any, v: Any, mask: Any = None, **kwargs: Any) -> Any:
    """Attention within a window, which shows only in a text that is longer than that."""
    kwargs.pop("attention_mask", None)
    return sdpa_attention_forward(module, q, k, v, _keep(q.shape[2], k.shape[2]), **kwargs)


@functools.wraps(sdpa_attention_forward)
def wrapped(module: Any, q: Any, k: Any, v: Any, mask: Any = None, **kwargs: Any) -> Any:
    """Says that it is transformers'."""
    return windowed(module, q, k, v, mask, **kwargs)


class Instance:  # noqa: PLW1641
    """No function, but may be called; and without a hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return windowed(*args, **kwargs)


def masked(batch_size: int, q_length: int, kv_length: int, **_: Any) -> Any:
    """A mask function of a user's."""
    return _keep(q_length, kv_length)


def scaled_product(q: Any, k: Any, v: Any, attn_mask: Any = None, scale: Any = None, **_: Any) -> Any:
    """What stands in the place of torch's own function: softmax of products within the window."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(~_keep(q.shape[2], k.shape[2]), -torch.inf).softmax(-1) @ v


def doubled(x: Any, groups: int) -> Any:
    """What stands in the place of a function that eager attention calls."""
    return x.repeat_interleave(groups, 1) * 2


def _as_function(patch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    patch.setitem(AttentionInterface._global_mapping, name, function)


def _locally(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", windowed)


def _in_the_file_alone(patch: pytest.MonkeyPatch) -> None:
    mine = AttentionInterface()
    mine["sdpa"] = windowed
    patch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", mine)


def _masks(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(AttentionMaskInterface._global_mapping, "sdpa", masked)


def _local_masks(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", masked)


def _code(patch: pytest.MonkeyPatch) -> None:
    same: Any = sdpa_attention_forward
    inner = FunctionType(same.__code__, same.__globals__, None, same.__defaults__, same.__closure__)

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *_: Any, **more: Any) -> Any:
        from test_own_code import inner, keep  # type: ignore[import-not-found]

        return inner(module, query, key, value, keep(query.shape[2], key.shape[2]), **more)

    given: Any = ModuleType("test_own_code")
    given.inner, given.keep = inner, _keep
    patch.setitem(sys.modules, "test_own_code", given)
    patch.setattr(same, "__code__", attention.__code__)


WAYS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "over sdpa": ("sdpa", lambda patch: _as_function(patch, "sdpa", windowed), "windowed"),
    "over eager": ("eager", lambda patch: _as_function(patch, "eager", windowed), "windowed"),
    "over sdpa, locally": ("sdpa", _locally, "windowed"),
    "over sdpa, in one file": ("sdpa", _in_the_file_alone, "windowed"),
    "in the file": ("eager", lambda p: p.setattr(modeling_llama, "eager_attention_forward", windowed), "windowed"),
    "wrapped": ("sdpa", lambda patch: _as_function(patch, "sdpa", wrapped), "sdpa_attention_forward"),
    "partial": ("sdpa", lambda p: _as_function(p, "sdpa", functools.partial(windowed)), "windowed"),
    "partial of theirs": (
        "sdpa",
        lambda p: _as_function(p, "sdpa", functools.partial(sdpa_attention_forward, is_causal=False)),
        "functools.partial of",
    ),
    "an object": ("sdpa", lambda patch: _as_function(patch, "sdpa", Instance()), "Instance"),
    "other code": ("sdpa", _code, "sdpa_attention_forward"),
    "a function of torch": (
        "sdpa",
        lambda patch: patch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled_product),
        "scaled_product",
    ),
    "a function that it calls": ("eager", lambda p: p.setattr(modeling_llama, "repeat_kv", doubled), "doubled"),
    "a mask function": ("sdpa", _masks, "masked"),
    "a mask function, locally": ("sdpa", _local_masks, "masked"),
}
ways = pytest.mark.parametrize(("name", "put", "said"), WAYS.values(), ids=WAYS)


@ways
def test_what_stands_there_before_attaching_is_refused(
    name: str, put: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_models.build("llama", attn_implementation=name)
    model.set_attn_implementation(name)
    put(monkeypatch)
    with pytest.raises(sp.AttachError, match=rf"{said}.*is not transformers' own.*set_attn_implementation\('sdpa'\)"):
        attach(model, "dense", gate=None)
    assert name == model.config._attn_implementation


@ways
@torch.no_grad()
def test_what_is_put_there_while_attached_runs_and_is_recorded(
    name: str, put: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_models.build("llama")
    model.set_attn_implementation(name)
    with attach(model, "streaming", gate=None, tail=0, **hf_models.STREAMING) as handle:
        before = hf_models.logits(model, LONG)
        put(monkeypatch)
        actual = hf_models.logits(model, LONG)
    assert torch.equal(hf_models.logits(model, LONG), actual)
    assert not torch.allclose(before, actual, rtol=1e-3)
    (reason,) = handle.report().fallbacks
    assert said in reason
    assert "not transformers' own" in reason


@pytest.mark.parametrize("function", [windowed, wrapped, functools.partial(windowed), Instance()])
def test_a_name_of_ones_own(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the dry run, which is told nothing by 64 tokens."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", function)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "mine", sdpa_mask)
    model = hf_models.build("llama")
    model.set_attn_implementation("mine")
    with pytest.raises(sp.AttachError, match="not transformers' own"):
        attach(model, "dense", gate=None)
    expected = hf_models.logits(model, LONG)
    with attach(model, "dense", gate=None, verify=False) as handle:
        assert torch.equal(expected, hf_models.logits(model, LONG))
    assert {"dense"} == {layer.mode for layer in handle.report().layers}


@pytest.mark.parametrize("function", [sdpa_attention_forward, eager])
@torch.no_grad()
def test_transformers_own_may_have_another_name(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "again", function)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "again", eager_mask if function is eager else sdpa_mask)
    model = hf_models.build("llama")
    model.set_attn_implementation("again")
    expected = hf_models.logits(model, LONG)
    with attach(model, "dense", gate=None, strict=True):
        torch.testing.assert_close(hf_models.logits(model, LONG), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["again", "my_sdpa"])
@torch.no_grad()
def test_softcaps_go_by_the_function_not_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sdpa drops them and eager does not, whatever they are registered as."""
    eager = name == "my_sdpa"
    function = modeling_gemma2.eager_attention_forward if eager else sdpa_attention_forward
    monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, eager_mask if eager else sdpa_mask)
    model = hf_models.build("gemma2-sdpa")
    model.set_attn_implementation(name)
    expected = hf_models.logits(model)
    with attach(model, "dense", gate=None, verify=False) as handle:
        torch.testing.assert_close(hf_models.logits(model), expected, atol=2e-5, rtol=1e-4)
    assert (not eager) == any("ignores this model's softcap" in note for note in handle.report().notes)


def test_what_is_transformers_own() -> None:
    own = [
        *(sdpa_attention_forward, eager, modeling_gpt_oss.eager_attention_forward, flash_attention_forward),
        *(sdpa_mask, eager_mask, causal_mask_function, sliding_window_causal_mask_function(7)),
        *(one for one in ALL_ATTENTION_FUNCTIONS.values() if not one.__module__.startswith("sparseprefill")),
    ]
    assert [""] * len(own) == [foreign(one) for one in own]
    assert "" != foreign(None)


@torch.no_grad()
def test_the_dry_run_reaches_far_behind_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layers tell an attention function less than they know, but only behind a thousand tokens."""
    usual = modeling_llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        found, weights = usual(self, hidden_states, *args, **{**kwargs, "past_key_values": past_key_values})
        if past_key_values is not None and past_key_values.get_seq_length() > 1000 and not _ours(self):
            found = found * 2
        return found, weights

    def _ours(module: Any) -> bool:
        return str(module.config._attn_implementation).startswith("sparseprefill")

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    attach(hf_models.build("llama"), "dense", gate=None).detach()
    with pytest.raises(sp.AttachError, match=r"plain attention behind 2,032 tokens: .*hidden states differ by"):
        attach(hf_models.build("llama", max_position_embeddings=4096), "dense", gate=None)
