"""Budgets against sets of tiles, one query tile at a time; on any mask, with and without a carry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import make
from helpers.plans import CALLS, Positions, plans, refined, whole
from sparseprefill.refiners.priority import NOTE

DATA = st.data()
BUDGETS = st.fixed_dictionaries({"tiles": st.integers(1, 6)}) | st.fixed_dictionaries(
    {"share": st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)}
)


class Tiles:
    """One query tile of one head: which key tiles it can see, has, and has in the carry's region."""

    def __init__(self, call: sp.AttentionCall, plan: sp.Plan, b: int, h: int, i: int) -> None:
        g, masks = call.geometry, [plan.mask] if plan.carry is None else [plan.mask, plan.carry.region]
        self.q = math.gcd(*[mask.tile_q for mask in masks])
        self.k = math.gcd(*[mask.tile_k for mask in masks])
        rows = range(i * self.q, (i + 1) * self.q)
        window = rows[-1] + 1 if call.window is None else call.window
        keys = range(max(0, rows[0] - window + 1), rows[-1] + 1)
        self.reach = {key // self.k for key in keys} & set(range(-(-g.kv_len // self.k)))
        self.own = {x // self.k for x in rows} & self.reach
        self.first = rows[0] // self.k
        have = [self._listed(mask, b, h, rows[0]) & self.reach for mask in masks]
        self.have, self.region = have[0], have[1] if len(have) == 2 else set()

    def _listed(self, mask: sp.SparseMask, b: int, h: int, x: int) -> set[int]:
        if mask.tiles is None:
            return set()
        row = x // mask.tile_q - int(mask.geometry.first_tile(mask.tile_q)[b])
        parts = mask.tile_k // self.k
        return {j * parts + n for j in mask.tiles.row(b, h, row).tolist() for n in range(parts)}

    def budget(self, size: dict[str, Any], rounding: Any) -> int:
        return int(size["tiles"] if "tiles" in size else rounding(len(self.reach) * size["share"]))


def each(call: sp.AttentionCall, size: int) -> list[tuple[int, int, int, list[int]]]:
    """(batch row, head, query tile, its real rows in the call)."""
    at = Positions.of(call)
    found = []
    for b in range(call.q.shape[0]):
        position = at.query[b, 0, :, 0]
        real = at.allowed[b, 0].any(-1)
        for i in (position[real] // size).unique().tolist():
            rows = ((position // size == i) & real).nonzero()[:, 0].tolist()
            found += [(b, h, i, rows) for h in range(call.q.shape[1])]
    return found


def grid(plan: sp.Plan) -> tuple[int, int]:
    masks = [plan.mask] if plan.carry is None else [plan.mask, plan.carry.region]
    return math.gcd(*[mask.tile_q for mask in masks]), math.gcd(*[mask.tile_k for mask in masks])


def paint(call: sp.AttentionCall, size: int, chosen: dict[tuple[int, int, int], set[int]], rows: Any) -> torch.Tensor:
    """The dense form of sets of key tiles of `size` tokens."""
    at = Positions.of(call)
    keep = torch.zeros(*call.q.shape[:3], call.k.shape[2], dtype=torch.bool)
    for b, h, i, real in rows:
        inside = torch.isin(at.key[b, 0, 0] // size, torch.tensor(sorted(chosen[b, h, i]), dtype=torch.int64))
        for n in real:
            keep[b, h, n] = inside
    return keep & at.allowed


def ranked(plan: sp.Plan, b: int, h: int, i: int, tiles: Any, q: int, k: int) -> list[int]:
    """By descending priority, the nearer first among equals."""
    left = plan.notes.get(NOTE)
    if left is None:
        return sorted(tiles, reverse=True)
    row = i * q // left.tile_q - int(plan.mask.geometry.first_tile(left.tile_q)[b])
    return sorted(tiles, key=lambda j: (-float(left.scores[b, h, row, j * k // left.tile_k]), -j))


@st.composite
def prioritised(draw: st.DrawFn, call: sp.AttentionCall) -> sp.Plan:
    """A plan; half of the time with the estimator's priorities, on a grid that the plan's divides."""
    plan = draw(plans(call))
    if draw(st.booleans(), label="no priority"):
        return plan
    tile_q, tile_k = (size * draw(st.integers(1, 3)) for size in grid(plan))
    shape = (*call.q.shape[:2], call.geometry.tile_rows(tile_q), call.geometry.tile_columns(tile_k))
    scores = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).float()
    return evolve(plan, notes={NOTE: sp.TilePriority(scores, tile_q, tile_k)})


@given(call=CALLS, data=DATA, size=BUDGETS)
def test_floor(call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any]) -> None:
    plan = data.draw(prioritised(call))
    q, k = grid(plan)
    chosen, rows = {}, each(call, q)
    for b, h, i, _ in rows:
        one = Tiles(call, plan, b, h, i)
        have = one.have | one.region
        order = ranked(plan, b, h, i, one.reach - have, q, k)
        chosen[b, h, i] = have | set(order[: max(0, one.budget(size, math.ceil) - len(have))])
        assert len(chosen[b, h, i]) >= min(one.budget(size, math.ceil), len(one.reach))
    expected = whole(plan) | paint(call, k, chosen, rows)
    assert torch.equal(expected, whole(refined(sp.BudgetFloor(**size), call, plan)))


@given(call=CALLS, data=DATA, size=BUDGETS, sink=st.integers(0, 2), local=st.integers(0, 2))
def test_ceiling(call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any], sink: int, local: int) -> None:
    plan = data.draw(prioritised(call))
    (q, k), mask = grid(plan), plan.mask
    chosen, rows = {}, each(call, q)
    spare: dict[tuple[int, int, int], int] = {}
    for b, h, i, _ in rows:
        one = Tiles(call, plan, b, h, i)
        own = one.own - one.region
        rest = one.have - own
        first = sorted((j for j in rest if j < sink), reverse=True)
        near = sorted((j for j in rest - set(first) if one.first - local <= j < one.first), reverse=True)
        order = [*first, *near, *ranked(plan, b, h, i, rest - set(first) - set(near), q, k)]
        room = one.budget(size, math.floor) - len(one.region) - len(own)
        chosen[b, h, i] = own | set(order[: max(0, room)])
        group = (b, h, i * q // mask.group_rows)
        left = max(0, one.budget(size, math.floor) - len(one.region) - len(chosen[b, h, i])) * k
        spare[group] = min(spare.get(group, left), left)
    expected = paint(call, k, chosen, rows)
    if mask.stripes is not None:
        expected |= stripes(call, mask, spare)
    if plan.carry is not None:
        expected &= ~plan.carry.region.to_dense()
    after = refined(sp.BudgetCeiling(**size, sink=sink, local=local), call, plan)
    assert torch.equal(expected, after.mask.to_dense())
    at = Positions.of(call)
    own_key = (at.query == at.key) & at.allowed
    assert bool((whole(after) | ~own_key).all())


def stripes(call: sp.AttentionCall, mask: sp.SparseMask, room: dict[tuple[int, int, int], int]) -> torch.Tensor:
    """The nearest columns of each group, as many as there is room for."""
    at = Positions.of(call)
    keep = torch.zeros(*call.q.shape[:3], call.k.shape[2], dtype=torch.bool)
    assert mask.stripes is not None
    for (b, h, group), count in room.items():
        row = group - int(mask.geometry.first_tile(mask.group_rows)[b])
        past = [y for y in mask.stripes.row(b, h, row).tolist() if y < (group + 1) * mask.group_rows]
        inside = torch.isin(at.key[b, 0, 0], torch.tensor(past[max(0, len(past) - count) :], dtype=torch.int64))
        keep[b, h] |= (at.query[b, 0] // mask.group_rows == group) & inside
    return keep & at.allowed


def test_a_ceiling_of_one_leaves_the_diagonal() -> None:
    call = make(64)
    after = refined(sp.BudgetCeiling(tiles=1), call, sp.Plan(sp.SparseMask.full(call, 8)))
    assert torch.equal(torch.eye(8, dtype=torch.bool).expand(1, 2, 8, 8), after.mask.tile_map())


def test_a_ceiling_gives_a_row_without_its_diagonal_its_own_tile() -> None:
    call = make(64)
    far = sp.SparseMask.from_tiles(call, torch.ones(8, 8, dtype=torch.bool).tril(-3), 8, diagonal=False)
    after = refined(sp.BudgetCeiling(tiles=2, sink=0), call, sp.Plan(far))
    expected = torch.eye(8, dtype=torch.bool) | torch.eye(8, dtype=torch.bool).roll(3, 0).tril()
    assert torch.equal(expected.expand(1, 2, 8, 8), after.mask.tile_map())


def test_the_mass_of_blocks_orders_the_tiles_of_bfla() -> None:
    call = make(256, kind="stripes")
    bare = sp.build("bfla", block=16, group=4, tile=8, keep_mass=1.0)
    capped = evolve(bare, refiners=(sp.BudgetCeiling(tiles=6, sink=0, local=0),))
    plain = evolve(bare, refiners=(sp.BudgetCeiling(tiles=6, sink=0, local=0), *bare.refiners))
    result = capped.run(call)
    counts = result.mask.tile_map().sum(-1)
    assert int(counts.max()) == 6
    blind = evolve(capped, estimator=sp.build("dense", block=8).estimator).run(call)
    assert float(sp.recall(call, blind).mean()) < float(sp.recall(call, result).mean())
    assert result.density < plain.run(call).density


def test_chunks_of_the_sort_are_the_whole() -> None:
    from sparseprefill.refiners.priority import highest

    source = torch.Generator().manual_seed(0)
    scores, candidates = (torch.rand(2, 3, 9, 17, generator=source) for _ in range(2))
    number = torch.randint(-1, 9, (2, 1, 9), generator=source)
    whole_map = highest(scores, candidates < 0.5, number)
    assert torch.equal(whole_map, highest(scores, candidates < 0.5, number, entries=1))
    expected = torch.minimum((candidates < 0.5).sum(-1), number.clamp(min=0).expand(2, 3, 9))
    assert torch.equal(expected, whole_map.sum(-1))


@pytest.mark.parametrize("kind", [sp.BudgetFloor, sp.BudgetCeiling])
@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({}, "pass tiles, or share, and not both"),
        ({"tiles": 1, "share": 0.5}, "pass tiles, or share, and not both"),
        ({"tiles": 0}, "tiles is 0"),
        ({"share": 1.5}, "share is 1.5"),
    ],
)
def test_parameters_out_of_bounds_are_named(kind: Any, size: dict[str, Any], words: str) -> None:
    with pytest.raises(sp.ParameterError, match=words):
        kind(**size)
