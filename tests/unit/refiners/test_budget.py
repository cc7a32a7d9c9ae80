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
from sparseprefill.mask import priority
from sparseprefill.refiners import fit

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


class Worth:
    """What one query tile of one head thinks of tiles and columns, a number per key; NaN is below all."""

    def __init__(self, plan: sp.Plan, b: int, h: int, position: int, k: int) -> None:
        self.given, self.at, self.k = plan.priority, (b, h, position), k
        self.geometry = plan.mask.geometry

    def tile(self, j: int) -> float:
        if self.given is None:
            return float(j * self.k)
        assert isinstance(self.given, sp.PriorityScores)
        assert isinstance(self.given.tiles, torch.Tensor)
        assert self.given.tile_q is not None
        assert self.given.tile_k is not None
        row = self._row(self.given.tiles, self.given.tile_q)
        return lowest(row[j * self.k // self.given.tile_k] / self.given.tile_k)

    def column(self, y: int) -> float:
        if self.given is None:
            return float(y)
        assert isinstance(self.given, sp.PriorityScores)
        if self.given.columns is None:
            self.k, k = 1, self.k
            found = self.tile(y)
            self.k = k
            return found
        assert isinstance(self.given.columns, torch.Tensor)
        return lowest(self._row(self.given.columns, self.given.rows)[y])

    def _row(self, scores: torch.Tensor, rows: int | None) -> torch.Tensor:
        b, h, position = self.at
        index = 0 if rows is None else position // rows - int(self.geometry.first_tile(rows)[b])
        return scores[b, h, min(index, scores.shape[2] - 1)]


def lowest(x: torch.Tensor) -> float:
    return -math.inf if bool(x.isnan()) else float(x)


def ranked(worth: Worth, tiles: Any) -> list[int]:
    """By descending priority, the nearer first among equals."""
    return sorted(tiles, key=lambda j: (-worth.tile(j), -j))


@st.composite
def prioritised(draw: st.DrawFn, call: sp.AttentionCall) -> sp.Plan:
    """A plan; two times of three with scores of tiles, or of tiles and columns, some NaN, on grids of their own."""
    plan, kind = draw(plans(call)), draw(st.sampled_from(["nothing", "tiles", "both"]), label="priority")
    if kind == "nothing":
        return plan
    source = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def scores(rows: int, columns: int) -> torch.Tensor:
        found = torch.randint(0, 7, (*call.q.shape[:2], rows, columns), generator=source).float()
        return torch.where(found == 6, torch.nan, found)

    g = call.geometry
    tile_q, tile_k = (size * draw(st.integers(1, 3)) for size in grid(plan))
    given = {"tiles": scores(g.tile_rows(tile_q), g.tile_columns(tile_k)), "tile_q": tile_q, "tile_k": tile_k}
    if kind == "both":
        rows = draw(st.none() | st.just(plan.mask.group_rows))
        given |= {"columns": scores(1 if rows is None else g.tile_rows(rows), g.kv_len) / 4, "rows": rows}
    return evolve(plan, priority=sp.PriorityScores(**given))  # type: ignore[arg-type]


@given(call=CALLS, data=DATA, size=BUDGETS)
def test_floor(call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any]) -> None:
    plan = data.draw(prioritised(call))
    q, k = grid(plan)
    chosen, rows = {}, each(call, q)
    for b, h, i, _ in rows:
        one = Tiles(call, plan, b, h, i)
        have = one.have | one.region
        order = ranked(Worth(plan, b, h, i * q, k), one.reach - have)
        chosen[b, h, i] = have | set(order[: max(0, one.budget(size, math.ceil) - len(have))])
        assert len(chosen[b, h, i]) >= min(one.budget(size, math.ceil), len(one.reach))
    expected = whole(plan) | paint(call, k, chosen, rows)
    assert torch.equal(expected, whole(refined(sp.BudgetFloor(**size), call, plan)))


def chosen_by(
    plan: sp.Plan, one: Tiles, at: tuple[int, int, int], size: dict[str, Any], sink: int, local: int
) -> tuple[list[int], list[int]]:
    """The rule in words: tiles in order while they fit beside every column of higher worth, then columns."""
    (b, h, i), k, mask = at, one.k, plan.mask
    own = one.own - one.region
    rest = one.have - own
    first = sorted((j for j in rest if j < sink), reverse=True)
    near = sorted((j for j in rest - set(first) if one.first - local <= j < one.first), reverse=True)
    worth = Worth(plan, b, h, i * one.q, k)
    order = [*first, *near, *ranked(worth, rest - set(first) - set(near))]
    before = len(first) + len(near)
    room = max(0, (one.budget(size, math.floor) - len(one.region) - len(own)) * k)
    seen = one.reach - one.own - one.region
    group = i * one.q // mask.group_rows
    listed = [] if mask.stripes is None else stripes_of(mask, b, h, group)
    listed = [y for y in listed if y // k in seen]
    columns = Worth(plan, b, h, group * mask.group_rows, k)
    listed.sort(key=lambda y: (-columns.column(y), -y))
    number = 0
    for n, j in enumerate(order, 1):
        better = 0 if n <= before else sum(columns.column(y) > worth.tile(j) for y in listed)
        left = sum(y // k not in order[:n] for y in listed)
        if n * k + better <= room or n * k + left <= room:
            number = n
    tiles = order[:number]
    open_columns = [y for y in listed if y // k not in tiles]
    return tiles, open_columns[: room - number * k]


def stripes_of(mask: sp.SparseMask, b: int, h: int, group: int) -> list[int]:
    assert mask.stripes is not None
    return mask.stripes.row(b, h, group - int(mask.geometry.first_tile(mask.group_rows)[b])).tolist()


@given(call=CALLS, data=DATA, size=BUDGETS, sink=st.integers(0, 2), local=st.integers(0, 2))
def test_ceiling(call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any], sink: int, local: int) -> None:
    plan = data.draw(prioritised(call))
    q, k = grid(plan)
    tiles: dict[tuple[int, int, int], set[int]] = {}
    columns: dict[tuple[int, int, int], set[int]] = {}
    rows = each(call, q)
    for b, h, i, _ in rows:
        one = Tiles(call, plan, b, h, i)
        chosen, stripes = chosen_by(plan, one, (b, h, i), size, sink, local)
        tiles[b, h, i], columns[b, h, i] = one.own - one.region | set(chosen), set(stripes)
    expected = paint(call, k, tiles, rows) | paint(call, 1, columns, rows)
    if plan.carry is not None:
        expected &= ~plan.carry.region.to_dense()
    after = refined(sp.BudgetCeiling(**size, sink=sink, local=local), call, plan)
    assert torch.equal(expected, after.mask.to_dense())
    at = Positions.of(call)
    own_key = (at.query == at.key) & at.allowed
    assert bool((whole(after) | ~own_key).all())


@given(call=CALLS, data=DATA, size=BUDGETS)
def test_a_ceiling_is_kept_and_spent(call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any]) -> None:
    """No query tile costs more keys than its budget, and nothing that was wanted would still fit."""
    plan = evolve(data.draw(prioritised(call)), carry=None)
    mask = refined(sp.BudgetCeiling(**size), call, plan).mask
    assert mask.group == 1
    for b, h, i, _ in each(call, mask.tile_q):
        one, found = Tiles(call, plan, b, h, i), Tiles(call, sp.Plan(mask), b, h, i).have
        stripes = set() if mask.stripes is None else set(stripes_of(mask, b, h, i))
        room = (one.budget(size, math.floor)) * one.k - len(found) * one.k - len(stripes)
        assert room >= 0 or (found == one.own and not stripes)
        assert room < one.k or one.have <= found
        lists = [] if plan.mask.stripes is None else stripes_of(plan.mask, b, h, i * one.q // plan.mask.group_rows)
        dropped = {y for y in lists if y // one.k in one.reach - found} - stripes
        assert room <= 0 or not dropped


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


@pytest.mark.parametrize(
    ("method", "more", "share"),
    [("vertical-slash", {}, 0.4), ("anchor-attention", {"theta": 30.0}, 0.9), ("flexprefill", {"tau": 0.0}, 0.4)],
)
def test_some_heads_and_groups_at_a_time_are_the_whole(
    method: str, more: dict[str, Any], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one head and one group, of one query tile, and an order in blocks of many columns change nothing."""
    call = make(170, heads=4, kv_heads=2, batch=2, starts=torch.tensor([0, 37], dtype=torch.int32), dtype=torch.float64)
    built = sp.build(method, **{**sp.default_registry().get(method).small, **more})
    plan, ceiling = built.plan(call, sp.Memory()), sp.BudgetCeiling(share=share)
    expected = refined(ceiling, call, plan).mask
    assert expected.stripes is not None
    assert bool((expected.stripes.counts > 0).any())
    monkeypatch.setattr(fit, "ENTRIES", 1)
    monkeypatch.setattr(fit, "CELLS", 1)
    monkeypatch.setattr(fit, "BLOCKS", 3)
    monkeypatch.setattr(priority, "ENTRIES", 1)
    assert torch.equal(expected.to_dense(), refined(ceiling, call, plan).mask.to_dense())


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
