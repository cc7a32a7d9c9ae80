"""Decoders with cross attention: it is no prefill, and what the layer's own attention did is what the report says."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.session import Session
from transformers import AutoModelForCausalLM, Cache, DynamicCache, EncoderDecoderCache

import sparseprefill as sp
from helpers.tiny import config_of

STREAMING: dict[str, Any] = {"sink": 16, "window": 16, "block": 16}


def decoder(model_type: str) -> Any:
    config = config_of(model_type)
    if hasattr(config, "add_cross_attention"):
        config.add_cross_attention = True
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("model_type", ["gpt2", "bart", "bert"])
@pytest.mark.parametrize("encoded", [40, 90])
@torch.no_grad()
def test_layers_that_ran_sparse_are_reported_so(model_type: str, encoded: int) -> None:
    model = decoder(model_type)
    inputs = {"input_ids": torch.randint(3, 90, (1, 90)), "encoder_hidden_states": torch.randn(1, encoded, 64)}
    wanted = model(**inputs).logits
    with attach(model, "dense", block=32, gate=None, strict=True) as handle:
        torch.testing.assert_close(model(**inputs).logits, wanted, atol=5e-5, rtol=1e-4)
    for layer in handle.report().layers:
        assert ("sparse", 1, 0, 1) == (layer.mode, layer.sparse_calls, layer.dense_calls, layer.cross_calls)
        assert (90, 90, 1.0, 1) == (layer.query_length, layer.key_length, layer.density, layer.calls)
        assert "and 1 of cross attention" in str(layer)
    assert {} == handle.report().fallbacks


def pair() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


@torch.no_grad()
def in_chunks(model: Any, cache: Any, change: Callable[[Any], object], **more: Any) -> Any:
    """Prompts that ran, and notes, of 128 tokens in two forwards. change: done to the cache between them."""
    ids = torch.randint(3, 90, (1, 128))
    with attach(model, "vertical-slash", gate=None, tail=0, gamma=0.5, block=16) as handle:
        given = model(ids[:, :50], past_key_values=cache, use_cache=True, **more)
        cache = next(one for one in given.values() if isinstance(one, Cache)) if isinstance(given, dict) else given[1]
        change(cache)
        model(ids[:, 50:], past_key_values=cache, use_cache=True, **more)
    return handle.report().prompts, list(handle.report().notes)


MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "encoded": {"encoder_hidden_states": torch.ones(1, 20, 64)},
    "tuple": {"return_dict": False},
}


@pytest.mark.parametrize(
    ("model_type", "make"),
    [("gpt2", DynamicCache), ("gpt2", pair), ("gpt2", lambda: None), ("roc_bert", lambda: None)],
    ids=["one", "pair", "made", "made pair"],
)
@pytest.mark.parametrize("more", MORE)
def test_a_cache_beside_one_of_cross_attention_goes_on(model_type: str, make: Callable[[], Any], more: str) -> None:
    """A model may put the cache that it is given into a pair, and give back that."""
    prompts, notes = in_chunks(decoder(model_type), make(), lambda _: None, **MORE[more])
    assert {"sparse": 1} == prompts
    cut = "prefill was cut at token 50; the method has no grain, so the cut may change what is selected"
    assert [cut] == notes


def test_such_a_cache_that_was_changed_is_that_of_another_prefill() -> None:
    prompts, notes = in_chunks(decoder("gpt2"), pair(), lambda cache: cache.reorder_cache(torch.tensor([0])))
    assert {"sparse": 1, "sparse behind sparse": 1} == prompts
    assert [] == notes


def test_what_is_not_causal_alone_is_no_cross_attention() -> None:
    session = Session(sp.build("streaming", **STREAMING))
    assert not session.cross(3)
    session.decline(3, "the mask is custom", (1, 90, 90))
    assert session.cross(3)
    assert not session.cross(4)
    assert [(3, 1)] == [(layer.layer, layer.cross_calls) for layer in session.report("none", "none").layers]
