"""What stages say they may hold: proportional to batch rows and heads, and linear in the keys of a long call."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparseprefill as sp
from sparseprefill.executors.triton import TritonExecutor

STAGES: dict[str, Any] = {
    "budget of tiles": sp.BudgetCeiling(tiles=4),
    "budget by share": sp.BudgetCeiling(share=0.5),
    "decay": sp.PositionDecay(),
    "decay of tiles": sp.PositionDecay(tiles=3),
    "recall": sp.RecallFloor(),
    "recall by span": sp.RecallFloor(span=1024, rows=8),
    "reference": sp.ReferenceExecutor(),
    "triton": TritonExecutor(),
    "proxy": sp.Proxy(),
}
IN_BLOCKS: dict[str, Any] = {
    "threshold": sp.RelativeThreshold(0.1),
    "values": sp.ValueWeights(1.0),
    "delta": sp.Delta(),
    "dense rows": sp.DenseRows(128),
}
EVERY = {**STAGES, **IN_BLOCKS}


def bound(stage: Any, *, batch: int = 3, heads: int = 6, rows: int = 72 << 7, keys: int = 520 << 7) -> int:
    """Of a call whose tensors take no memory."""
    x = torch.zeros(1, 1, 1, 1)
    kv = x.expand(batch, heads // 2, keys, 64)
    found: int = stage.workspace(sp.AttentionCall(x.expand(batch, heads, rows, 64), kv, kv))
    return found


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_twice_the_batch_or_the_heads_needs_twice_the_room(stage: Any) -> None:
    assert 2 * bound(stage) == bound(stage, batch=6) == bound(stage, heads=12)
    assert 3 * bound(stage) == bound(stage, batch=9)


@pytest.mark.parametrize("stage", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_beside_blocks_of_one_size_so_does_the_rest(stage: Any) -> None:
    for name, size in (("batch", 3), ("heads", 6)):
        first, second, third = (bound(stage, **{name: n * size}) for n in (1, 2, 3))
        assert first < second
        assert third - second == second - first


@pytest.mark.parametrize("stage", EVERY.values(), ids=EVERY)
def test_room_is_linear_in_the_keys_and_grows_with_the_rows(stage: Any) -> None:
    first, second, third = (bound(stage, keys=n * 520 << 7) for n in (1, 2, 3))
    assert third - second == second - first >= 0
    assert (first < second) == (not isinstance(stage, sp.ReferenceExecutor))
    assert bound(stage, rows=32 << 7) < first < bound(stage, rows=144 << 7)


@pytest.mark.parametrize("stage", EVERY.values(), ids=EVERY)
def test_a_token_needs_room_and_a_long_prompt_less_than_its_dense_logits(stage: Any) -> None:
    assert 0 < bound(stage, rows=1, keys=1)
    assert bound(stage) < 4 * 3 * 6 * (72 * 520 << 14)
