"""The dense tail in transformers models: who gets it, which rows, and what turns it off."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.defaults import TAIL

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING


def masks(method: Any, inputs: Any, **options: Any) -> tuple[list[tuple[sp.AttentionCall, torch.Tensor]], Any]:
    """The calls of layer 0 and their masks, bool ``[B, Hq, Nq, Nkv]``, and the report."""
    model, seen = hf_models.build("llama"), []

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        if call.layer == 0:
            seen.append((call, result.mask.to_dense()))

    parameters = STREAMING if isinstance(method, str) else {}
    with torch.no_grad(), attach(model, method, observe=observe, gate=None, **parameters, **options) as handle:
        if isinstance(inputs, torch.Tensor):
            model.generate(inputs, max_new_tokens=2, do_sample=False)
        else:
            model(**inputs)
    return seen, handle.report()


@pytest.mark.parametrize("built", [False, True])
def test_by_default_the_last_128_rows_see_everything(built: bool) -> None:
    method = sp.build("streaming", **STREAMING) if built else "streaming"
    ((call, mask),), report = masks(method, hf_models.prompt(300))
    assert (128, 128) == (TAIL, report.tail)
    assert "grain 1 tokens; dense tail 128 rows)" in str(report)
    visible = call.geometry.visible()[0].expand_as(mask[0])
    assert torch.equal(visible[:, -128:], mask[0, :, -128:])
    bare = sp.build("streaming", **STREAMING).run(call).mask.to_dense()
    assert torch.equal(bare[:, :, : 160 - 16], mask[:, :, : 160 - 16]), "tiles of 16 tokens are rounded up, no more"


def test_without_a_tail_the_method_is_what_it_is() -> None:
    ((call, mask),), report = masks("streaming", hf_models.prompt(300), tail=0)
    assert torch.equal(sp.build("streaming", **STREAMING).run(call).mask.to_dense(), mask)
    assert 0 == report.tail
    assert "tail" not in str(report)


def test_padded_rows_have_each_their_last_ones() -> None:
    ((call, mask),), _ = masks("streaming", hf_models.padded(200, (0, 70, 190)), tail=20)
    visible = call.geometry.visible()
    assert torch.equal(visible[:, None, -20:].expand_as(mask[:, :, -20:]), mask[:, :, -20:])
    assert not torch.equal(visible[0, 100:150], mask[0, 0, 100:150])


def test_of_a_prompt_in_chunks_each_ones_last_rows() -> None:
    """A cache that grows does not tell where the prompt ends."""
    model, dense = hf_models.build("llama"), []

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        if call.layer == 0:
            mask, visible = result.mask.to_dense()[0, 0], call.geometry.visible()[0]
            dense.extend((call.geometry.q_offset + (mask == visible).all(-1).nonzero()[:, 0]).tolist())

    with torch.no_grad(), attach(model, "streaming", tail=16, observe=observe, gate=None, **STREAMING) as handle:
        model.generate(hf_models.prompt(192), max_new_tokens=1, do_sample=False, prefill_chunk_size=96)
    assert [*range(48), *range(80, 96), *range(176, 192)] == dense, "what sink and window leave nothing out of, too"
    assert {} == handle.report().notes
