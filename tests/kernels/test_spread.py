"""The kernel that gives query tiles what sampled rows choose, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.device import CUDA, DEVICE, DTYPES
from kernels.test_sampled import FIELDS, call_of
from sparseprefill import RecallFloor, kernels
from sparseprefill.kernels.sampled.spread import spread
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan
from sparseprefill.refiners.stretches import Stretches

GRIDS = [(16, 16), (32, 16), (16, 32), (24, 16), (16, 24), (8, 8)]


@settings(max_examples=150 if CUDA else 25)
@given(
    lengths=st.tuples(st.sampled_from([1, 16, 127, 128, 129, 251]), st.sampled_from([0, 1, 77, 300])),
    fields=st.sampled_from(FIELDS),
    grid=st.sampled_from(GRIDS),
    rows=st.sampled_from([64, 1, 5]),
    span=st.sampled_from([None, 96]),
    neighbours=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(lengths=(251, 300), fields=FIELDS[-1], grid=(24, 16), rows=5, span=96, neighbours=True, seed=1)
@example(lengths=(251, 0), fields=FIELDS[3], grid=(16, 24), rows=64, span=None, neighbours=True, seed=2)
def test_what_query_tiles_hear(
    lengths: tuple[int, int],
    fields: dict[str, Any],
    grid: tuple[int, int],
    rows: int,
    span: int | None,
    neighbours: bool,
    seed: int,
) -> None:
    geometry = call_of(lengths[0], sum(lengths), torch.float32, (2, 1), **fields).geometry
    at = Stretches.deal(geometry, grid[0], rows, span)
    source, columns = torch.Generator().manual_seed(seed), geometry.tile_columns(grid[1])
    chosen, free = (
        torch.rand(geometry.batch, 2, n, columns, generator=source) < share
        for n, share in ((at.rows.shape[1], 0.2), (geometry.tile_rows(grid[0]), 0.7))
    )
    floor = RecallFloor(speaks_for="neighbours" if neighbours else "stretch")
    expected = floor._spread(chosen, at, grid) & free
    there = (x.to(DEVICE) for x in (chosen, at.own, at.of, free))
    moved, own, of, open_ = there
    found = spread(moved, own, of, at.each, open_, grid, neighbours=neighbours)
    assert torch.equal(expected, found.cpu())


@pytest.mark.parametrize("speaks_for", ["neighbours", "stretch", "tile"])
@pytest.mark.parametrize("target", [0.9, 1.0])
def test_a_floor_is_the_same_with_kernels(monkeypatch: pytest.MonkeyPatch, speaks_for: Any, target: float) -> None:
    call = call_of(150, 200, DTYPES[1], **FIELDS[5])
    floor = RecallFloor(target=target, rows=4, speaks_for=speaks_for)
    expected = floor.refine(call, Plan(SparseMask.empty(call, 16)), Memory())
    monkeypatch.setattr(kernels, "serve", lambda _: True)
    if CUDA:
        from kernels.test_sampled import moved

        call = moved(call)
    found = floor.refine(call, Plan(SparseMask.empty(call, 16)), Memory())
    assert torch.equal(expected.mask.to_dense(), found.mask.to_dense().cpu())
