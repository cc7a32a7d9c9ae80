"""The kernels of a recall floor against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.device import CUDA, DEVICE, DTYPES
from kernels.test_sampled import FIELDS, call_of
from sparseprefill import RecallFloor, kernels
from sparseprefill.call import rows_at
from sparseprefill.kernels.sampled import floor as launch
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.samples import Raised, Stretches, deal
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan
from sparseprefill.refiners.recall import _reach
from sparseprefill.statistics.by_tile import mass_of

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GRIDS = [(16, 16), (32, 16), (16, 32), (24, 16), (16, 24), (8, 8)]
WIDTH = 1e-6
"""Of a target: rounding of float32 sums decides nothing beyond it."""


def there(at: Stretches) -> Stretches:
    names = ("rows", "real", "position", "own", "first", "of", "inhabited")
    return evolve(at, **{name: getattr(at, name).to(DEVICE) for name in names})


@frozen
class Spot:
    """A call, where its rows are sampled, and what the draws begin with."""

    lengths: tuple[int, int]
    fields: dict[str, Any]
    grid: tuple[int, int]
    rows: int
    span: int | None
    neighbours: bool
    seed: int

    def placed(self) -> tuple[Geometry, Stretches, torch.Generator]:
        geometry = call_of(self.lengths[0], sum(self.lengths), torch.float32, (2, 1), **self.fields).geometry
        at = deal(geometry, self.grid[0], self.rows, self.span)
        return geometry, at, torch.Generator().manual_seed(self.seed)

    @property
    def speaks_for(self) -> Any:
        return "neighbours" if self.neighbours else "stretch"


SPOTS = st.builds(
    Spot,
    lengths=st.tuples(st.sampled_from([1, 16, 127, 128, 129, 251]), st.sampled_from([0, 1, 77, 300])),
    fields=st.sampled_from(FIELDS),
    grid=st.sampled_from(GRIDS),
    rows=st.sampled_from([64, 1, 5]),
    span=st.sampled_from([None, 96]),
    neighbours=st.booleans(),
    seed=st.integers(0, 1000),
)
LATE = Spot((251, 300), FIELDS[-1], (24, 16), rows=5, span=96, neighbours=True, seed=1)


@settings(max_examples=150 if CUDA else 15)
@given(spot=SPOTS)
@example(spot=LATE)
@example(spot=Spot((251, 0), FIELDS[3], (16, 24), rows=64, span=None, neighbours=True, seed=2))
def test_what_query_tiles_hear(spot: Spot) -> None:
    (geometry, at, source), grid = spot.placed(), spot.grid
    columns = geometry.tile_columns(grid[1])
    chosen, have = (
        torch.rand(geometry.batch, 2, n, columns, generator=source) < share
        for n, share in ((at.rows.shape[1], 0.2), (geometry.tile_rows(grid[0]), 0.3))
    )
    reach = _reach(geometry, grid)
    seen = reach & at.inhabited[:, None, :, None]
    floor = RecallFloor(speaks_for=spot.speaks_for)
    added = floor._spread(chosen, at, grid) & seen & ~have
    counts = torch.stack([x.sum(-1) for x in (have & seen, seen & ~have, added)], -1)
    held = launch.Held(have.to(DEVICE), reach.to(DEVICE))
    found, counted = launch.spread(chosen.to(DEVICE), there(at), held, grid, neighbours=spot.neighbours)
    assert torch.equal(added, found.cpu())
    assert torch.equal(counts, counted.cpu().long())


def masses(
    geometry: Geometry, at: Stretches, grid: tuple[int, int], source: torch.Generator, kind: str
) -> tuple[Tensor, Tensor | None]:
    """LSE of sampled rows by key tile, as they may be: equal ones, none at all, part of it kept by stripes."""
    shape = (geometry.batch, 2, at.rows.shape[1], geometry.tile_columns(grid[1]))
    every = torch.randn(shape, generator=source) * 3
    every = every.round() if "ties" in kind else every
    unseen = ~rows_at(_reach(geometry, grid) & at.inhabited[:, None, :, None], at.own) | ~at.real[:, None, :, None]
    every = every.masked_fill(unseen | (torch.rand(shape, generator=source) < 0.1), -torch.inf)
    if "nan" in kind:
        every[0, 0, -1, 0] = torch.nan
    if "stripes" not in kind:
        return every, None
    return every, every + torch.rand(shape, generator=source).log()


@settings(max_examples=150 if CUDA else 15)
@given(
    spot=SPOTS,
    target=st.sampled_from([0.95, 0.5, 0.0, 1.0]),
    dense_from=st.sampled_from([0.5, 0.0, 1.0, 0.3]),
    kind=st.sampled_from(["plain", "ties", "stripes", "ties, stripes", "stripes, nan"]),
)
@example(spot=LATE, target=0.95, dense_from=0.5, kind="stripes")
def test_what_a_floor_adds(spot: Spot, target: float, dense_from: float, kind: str) -> None:
    (geometry, at, source), grid = spot.placed(), spot.grid
    by_tile = masses(geometry, at, grid, source, kind)
    have = torch.rand(geometry.batch, 2, geometry.tile_rows(grid[0]), by_tile[0].shape[3], generator=source) < 0.2
    reach = _reach(geometry, grid)

    def plain(share: float) -> Any:
        floor = RecallFloor(target=min(max(share, 0.0), 1.0), dense_from=dense_from, speaks_for=spot.speaks_for)
        return floor._raised(mass_of(*by_tile), at, have, grid, reach)

    every, kept = by_tile
    moved = (every.to(DEVICE), None if kept is None else kept.to(DEVICE))
    held = launch.Held(have.to(DEVICE), reach.to(DEVICE))
    raised = launch.raised(
        moved, there(at), held, grid, target=target, dense_from=dense_from, neighbours=spot.neighbours
    )
    found = Raised(*(x.cpu() for x in raised))
    less, same, more = (plain(target + width) for width in (-WIDTH, 0.0, WIDTH if target < 1 else 0.0))
    assert bool((less.added <= found.added).all())
    assert bool((found.added <= more.added).all())
    assert bool(((found.dense == less.dense) | (found.dense == more.dense)).all())
    torch.testing.assert_close(same.before, found.before, rtol=2e-5, atol=2e-5, equal_nan=True)
    if torch.equal(same.added, found.added):
        torch.testing.assert_close(same.after, found.after, rtol=2e-5, atol=2e-5, equal_nan=True)


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
