"""Masks: what is read of transformers' own, who may read ours, and which no call can express."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.adapters.huggingface import attach, masks
from torch import Tensor
from transformers import StaticCache, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING

from .test_huggingface_flight import both, build, close


def patterns() -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(1, 12))


@given(window=patterns(), past=st.integers(0, 9), rows=st.integers(2, 9), spare=st.integers(0, 5), data=st.data())
def test_a_compact_mask_says_what_the_stock_mask_says(
    window: int | None, past: int, rows: int, spare: int, data: st.DataObject
) -> None:
    total = past + rows
    padding = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=total, max_size=total), min_size=1, max_size=3))
    )
    function: Any = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    sizes: dict[str, Any] = {"batch_size": len(padding), "q_length": rows, "kv_length": total + spare, "q_offset": past}
    pattern = masks.classify(function, window, True)
    assert pattern is not None
    assert pattern == masks.Pattern(window)
    asked = {**sizes, "kv_offset": 0, "mask_function": function, "attention_mask": padding, "local_size": window}
    order = masks.Order.of(pattern, masking_utils.sdpa_mask, asked)
    mask, compact = masks.LazyMask.of(order), order.compact()
    stock: Any = masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
    assert mask.shape == (len(padding), 1, rows, total + spare)
    assert torch.equal(mask & True, stock.expand(mask.shape)), "whoever reads it reads the stock mask"
    assert compact.used == total
    assert compact.window == window
    if not compact.holes:
        q = torch.zeros(len(padding), 1, rows, 8)
        k = torch.zeros(len(padding), 1, total, 8)
        call = sp.AttentionCall(q, k, k, starts=compact.starts, lengths=compact.lengths, window=compact.window)
        real = padding[:, past:, None]
        assert torch.equal(call.geometry.visible() & real, stock[:, 0, :, :total] & real)


def test_masks_of_other_patterns_are_left_alone() -> None:
    causal = masking_utils.causal_mask_function
    chunked = masking_utils.chunked_causal_mask_function(24, torch.zeros(2, dtype=torch.long))
    both = masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(torch.zeros(1, 4)))
    assert masks.classify(causal, None, False) is None
    assert masks.classify(chunked, 24, True) is None
    assert masks.classify(both, None, True) is None
    assert masks.classify(masking_utils.bidirectional_mask_function, 8, True) is None


def remap_positions_for_packed_sequence(mask_function: Callable[..., Any], position_ids: Tensor) -> Callable[..., Any]:
    """As transformers has it from 5.24 on."""

    def inner_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_function(batch_idx, head_idx, position_ids[batch_idx, q_idx], position_ids[batch_idx, kv_idx])

    return inner_mask


@pytest.mark.parametrize("window", [None, 3])
def test_a_row_of_one_sequence_is_not_packed(window: int | None) -> None:
    """Under torch.compile every mask arrives as one for packed sequences."""
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", remap_positions_for_packed_sequence)
    function: Any = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)

    def pattern(positions: list[int], sequences: list[int], *makers: Any) -> masks.Pattern | None:
        inner = function
        for maker in makers:
            inner = maker(inner, torch.tensor([positions]))
        packed = masking_utils.packed_sequence_mask_function(torch.tensor([sequences]))
        return masks.classify(masking_utils.and_masks(inner, packed), window, False)

    assert masks.Pattern(window) == pattern([2, 3, 4, 5], [0, 0, 0, 0])
    assert masks.Pattern(window) == pattern([2, 3, 4, 5], [0, 0, 0, 0], remap)
    assert pattern([0, 1, 0, 1], [0, 0, 1, 1], remap) is None
    assert pattern([0, 1, 0, 1], [0, 0, 0, 0], remap) is None, "tokens counted twice"
    assert masks.classify(remap(function, torch.tensor([[0, 1, 2]])), window, False) is None, "packed by no mask"


@torch.no_grad()
def test_masks_that_no_call_can_express_run_dense() -> None:
    model: Any = hf_models.build("llama")
    ids, square = hf_models.prompt(), torch.ones(90, 90, dtype=torch.bool).tril()
    holes = torch.ones_like(ids)
    holes[0, 30:40] = 0
    square[60:, 3:9] = False
    packed = torch.cat([torch.arange(50), torch.arange(40)])[None]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"attention_mask": holes}, "has holes"),
        ({"attention_mask": square[None, None]}, "custom"),
        ({"position_ids": packed, "use_cache": False}, "custom"),
        ({"output_attentions": True}, "weights are requested"),
    ]
    for inputs, reason in cases:
        wanted = model(ids, **inputs).logits
        with attach(model, "streaming", tail=0, **STREAMING) as handle:
            torch.testing.assert_close(model(ids, **inputs).logits, wanted)
        assert any(reason in why for why in handle.report().fallbacks), handle.report()
        assert f"{reason}" in str(handle.report())


@both
@torch.no_grad()
def test_a_mask_made_before_detaching_is_the_stock_mask(implementation: str) -> None:
    """As `generate` makes them, ahead of the forward, for a static cache."""
    model, inputs = build(implementation), hf_models.padded(60, (0, 9))
    real = inputs["attention_mask"].bool()

    def mask(cache: Any) -> Any:
        embeds = torch.empty(2, 60, 0)
        return masking_utils.create_causal_mask(model.config, embeds, real, cache)

    def cache() -> Any:
        return StaticCache(config=model.config, max_cache_len=80)

    wanted = model(inputs["input_ids"], attention_mask=mask(first := cache()), past_key_values=first).logits
    handle, second = attach(model, "streaming", tail=0, gate=None, **STREAMING), cache()
    lazy = mask(second)
    handle.detach()
    got = model(inputs["input_ids"], attention_mask=lazy, past_key_values=second).logits
    assert torch.equal(got, wanted)


class Tail(torch.nn.Module):
    """A layer that computes its last rows alone, with the rows of the mask that belong to them."""

    def __init__(self, layer: Any, rows: int) -> None:
        super().__init__()
        self.layer, self.rows = layer, rows

    def forward(self, hidden: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Hidden states of the last rows; the others pass."""
        attention, norm = self.layer.self_attn, self.layer.input_layernorm
        whole = norm(hidden)
        cos, sin = kwargs["position_embeddings"]
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, -self.rows :]
        shape = (*whole.shape[:2], -1, attention.head_dim)
        q, k, v = (p(whole).view(shape).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation, modeling_llama.eager_attention_forward
        )
        out, _ = interface(attention, q[:, :, -self.rows :], k, v, attention_mask, scaling=attention.scaling)
        out = attention.o_proj(out.reshape(hidden.shape[0], self.rows, -1))
        hidden = torch.cat([hidden[:, : -self.rows], hidden[:, -self.rows :] + out], 1)
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))


@both
@pytest.mark.parametrize("rows", [1, 4, 20])
@torch.no_grad()
def test_a_layer_that_shortens_its_queries_gets_the_rows_of_the_stock_mask(implementation: str, rows: int) -> None:
    model, inputs = build(implementation), hf_models.padded(60, (0, 9))
    model.model.layers[1] = Tail(model.model.layers[1], rows)
    wanted = model(**inputs).logits[:, -rows:]
    with attach(model, "dense", block=16, gate=None, verify=False):
        close(model(**inputs).logits[:, -rows:], wanted)


@both
@pytest.mark.parametrize("inference", [False, True])
def test_whoever_reads_a_lazy_mask_reads_the_stock_mask(implementation: str, inference: bool) -> None:
    model, padding = build(implementation), hf_models.padded(60, (0, 9))["attention_mask"].bool()
    embeds = torch.empty(2, 60, 0)
    with torch.inference_mode(inference):
        wanted: Any = masking_utils.create_causal_mask(model.config, embeds, padding, None)
        with attach(model, "dense", gate=None, verify=False):
            mask: Any = masking_utils.create_causal_mask(model.config, embeds, padding, None)
        assert isinstance(mask, masks.LazyMask)
        assert (mask.shape, mask.dtype, mask.device) == (wanted.shape, wanted.dtype, wanted.device)
        for kept in (mask.contiguous(), mask[..., :60], mask.to(mask.device), mask[:, :, -60:], mask.detach()):
            assert isinstance(kept, masks.LazyMask)
            assert kept.order is mask.order
        assert isinstance(mask.to("meta"), masks.LazyMask)
        readers: list[Callable[[Any], Any]] = [
            lambda x: x + torch.ones(2, 4, 60, 60),
            lambda x: torch.ones(2, 4, 60, 60) + x,
            lambda x: x[:, :, -3:],
            lambda x: x[:, :, 5],
            lambda x: x.to(torch.float16),
            lambda x: torch.cat([x, x], -1),
            lambda x: torch.where(x > -1, 1.0, 2.0),
            lambda x: x.sum(),
        ]
        for read in readers:
            assert type(read(mask)) is Tensor
            assert torch.equal(read(mask), read(wanted))
        assert not mask.order.changed
        mask[:, :, :, 7] = wanted[0, 0, 0, -1]
        assert mask.order.changed, "a mask that somebody wrote into is a custom one"
        assert torch.equal(masks.stock(mask)[:, 0, :, 7], wanted[0, 0, 0, -1].expand(2, 60))


@both
@torch.no_grad()
def test_a_layer_that_writes_into_its_mask_runs_dense_with_what_it_wrote(implementation: str) -> None:
    model, inputs = build(implementation), hf_models.padded(60, (0, 9))

    def write(module: Any, args: Any, kwargs: Any) -> None:
        mask = kwargs["attention_mask"]
        mask[:, :, 40:, :30] = mask[:, :, :1, -1:]  # nobody sees the last key from the first row

    model.model.layers[0].self_attn.register_forward_pre_hook(write, with_kwargs=True)
    wanted = model(**inputs).logits
    with attach(model, "dense", block=16, gate=None, verify=False) as handle:
        assert torch.equal(model(**inputs).logits, wanted)
    assert all("custom" in reason for reason in handle.report().fallbacks)


def test_a_mask_that_has_no_tensor_says_so() -> None:
    asked = {"batch_size": 1, "q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
    mask = masks.LazyMask.of(masks.Order.of(masks.Pattern(), lambda **_: None, asked))
    assert masks.stock(mask) is None
    with pytest.raises(
        sp.AttachError, match="add reads the mask as a tensor, which this attention implementation does not make"
    ):
        _ = mask + 1
