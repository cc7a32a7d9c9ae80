"""What stages say they may hold: proportional to batch rows and heads, and linear in the keys of a long call."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparseprefill.plugins.flashprefill import threshold
from sparseprefill.plugins.stem import values

import sparseprefill as sp
from sparseprefill.executors import cpu
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.refiners.recall import KeptWhole

STAGES: dict[str, Any] = {
    "budget of tiles": sp.BudgetCeiling(tiles=4),
    "budget by share": sp.BudgetCeiling(share=0.5),
    "decay": sp.PositionDecay(),
    "decay of tiles": sp.PositionDecay(tiles=3),
    "recall": sp.RecallFloor(),
    "recall by span": sp.RecallFloor(span=1024, rows=8),
    "reference": sp.ReferenceExecutor(),
    "triton": TritonExecutor(),
}
IN_BLOCKS: dict[str, Any] = {
    "threshold": sp.RelativeThreshold(0.1),
    "values": sp.ValueWeights(1.0),
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


LISTS = 18 * (3 * 6 * 16 + 700 * 48)
FIGURES: list[tuple[str, Any, int]] = [
    ("triton: a fourth of the maps", TritonExecutor(), 18 * (3 * 6 * 4 + 700 * 48)),
    ("stripes for 4 tiles", sp.BudgetCeiling(tiles=4), LISTS + 18 * 3 * (4 * 128) * 4),
    ("stripes for half of 6 tiles", sp.BudgetCeiling(share=0.5), LISTS + 18 * 3 * (3 * 128) * 4),
    ("stripes for all 6 tiles at most", sp.BudgetCeiling(tiles=9), LISTS + 18 * 3 * (6 * 128) * 4),
    ("decay: alike", sp.PositionDecay(tiles=4), LISTS + 18 * 3 * (4 * 128) * 4),
    ("8 sampled rows", sp.RecallFloor(rows=8), LISTS + 18 * 8 * (700 + 40 * 6)),
    ("8 in each of 3 spans", sp.RecallFloor(rows=8, span=128), LISTS + 18 * 24 * (700 + 40 * 6)),
    ("no more than there are", sp.RecallFloor(rows=512), LISTS + 18 * 300 * (700 + 40 * 6)),
    ("notes of 8 rows", KeptWhole(8), 3 * (64 * 300 + 32 * 6 * 8)),
    ("notes of all", KeptWhole(512), 3 * (64 * 300 + 32 * 6 * 300)),
    ("a map of one head", sp.DenseRows(64), 3 * 3 * (6 * 16 + 6 * 64)),
    ("of tiles of 64", sp.DenseRows(64, tile=64), 3 * 5 * (11 * 16 + 6 * 64)),
    ("thresholds", sp.SkipSoftmax(0.1), 3 * 64),
]


@pytest.mark.parametrize(("stage", "expected"), [one[1:] for one in FIGURES], ids=[one[0] for one in FIGURES])
def test_figures_of_one_call(stage: Any, expected: int) -> None:
    """3 batch rows of 6 heads, 18 in all; 300 rows in 3 tiles of 128, or 5 of 64; 700 keys in 6, or 11. `LISTS` is what
    a stage holds that states no bound of its own."""
    assert expected == bound(stage, rows=300, keys=700)


MORE: dict[str, tuple[Any, Any, Callable[[int], int]]] = {
    # Lists of one group of rows that may have every column; scores of the keys of 3 batch rows.
    "threshold": (
        *(sp.RelativeThreshold(0.1), threshold),
        lambda block: LISTS + 18 * 701 * 4 + 16 * max(block, 3 * 700),
    ),
    # Norms of the keys of 9 KV heads.
    "values": (*(sp.ValueWeights(1.0), values), lambda block: LISTS + 64 * 9 * 700 + 24 * max(block, 9 * 700)),
}


@pytest.mark.parametrize("block", [1, 1 << 21])
@pytest.mark.parametrize(("stage", "module", "expected"), MORE.values(), ids=MORE)
def test_figures_beside_a_block(
    stage: Any, module: Any, expected: Callable[[int], int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same call; block: entries of one, where the call's own are not more."""
    monkeypatch.setattr(module, "ENTRIES", block)
    assert expected(block) == bound(stage, rows=300, keys=700)


def test_one_token_gathers_its_own_keys_alone() -> None:
    """2 heads and one key and value: 512 bytes for each of 2 rows; the rest as below."""
    held, maps, stripes = (4 * 2 + 2) * (128 + 2) * 4, 2 * (64 + 48), 64 * (1 + 2)
    assert held + maps + stripes + (2 + 5) * 2 * 512 == bound(cpu.CpuExecutor(), batch=1, heads=2, rows=1, keys=1)


@pytest.mark.parametrize("gathered", [1, 4 << 20])
@pytest.mark.parametrize("together", [1, 1 << 20])
def test_figures_of_a_cpu(gathered: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row four times over, and keys by head; maps and their lists; stripes of one head, if every key is one, and
    of some heads at once; keys and values gathered, and 5 logits beside each number of them: 128 rows to 64 numbers.
    """
    monkeypatch.setattr(cpu, "GATHERED", gathered)
    monkeypatch.setattr(cpu, "COLUMNS", together)
    keys, held = 700 * 128 * 4, (4 * 18 * 300 + 18 * 700) * (128 + 2) * 4
    maps, stripes = 18 * (3 * 6 * 64 + 700 * 48), 64 * (3 * 700 + min(together, 18 * 3 * 700))
    gatherings = (2 + 5) * max(gathered, keys)
    assert held + maps + stripes + gatherings == bound(cpu.CpuExecutor(), rows=300, keys=700)
