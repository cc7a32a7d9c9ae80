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
from helpers.plans import CALLS, Positions, refined, whole
from helpers.tile_sets import Tiles, Worth, each, grid, paint, prioritised, ranked, stripes_of
from sparseprefill.mask import priority
from sparseprefill.refiners import budget as fit

DATA = st.data()
BUDGETS = st.fixed_dictionaries({"tiles": st.integers(1, 6)}) | st.fixed_dictionaries(
    {"share": st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)}
)


def budget(one: Tiles, size: dict[str, Any], rounding: Any) -> int:
    return int(size["tiles"] if "tiles" in size else rounding(len(one.reach) * size["share"]))


@given(call=CALLS, data=DATA, size=BUDGETS)
def test_floor(call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any]) -> None:
    plan = data.draw(prioritised(call))
    q, k = grid(plan)
    chosen, rows = {}, each(call, q)
    for b, h, i, _ in rows:
        one = Tiles(call, plan, b, h, i)
        have = one.have | one.region
        order = ranked(Worth(plan, b, h, i * q, k), one.reach - have)
        chosen[b, h, i] = have | set(order[: max(0, budget(one, size, math.ceil) - len(have))])
        assert len(chosen[b, h, i]) >= min(budget(one, size, math.ceil), len(one.reach))
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
    room = max(0, (budget(one, size, math.floor) - len(one.region) - len(own)) * k)
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


def capped(call: sp.AttentionCall, plan: sp.Plan, size: dict[str, Any], sink: int, local: int) -> torch.Tensor:
    """bool ``[B, Hq, Nq, Nkv]``: the mask under a ceiling, one query tile at a time."""
    q, k = grid(plan)
    tiles: dict[tuple[int, int, int], set[int]] = {}
    columns: dict[tuple[int, int, int], set[int]] = {}
    rows = each(call, q)
    for b, h, i, _ in rows:
        one = Tiles(call, plan, b, h, i)
        chosen, stripes = chosen_by(plan, one, (b, h, i), size, sink, local)
        tiles[b, h, i], columns[b, h, i] = one.own - one.region | set(chosen), set(stripes)
    expected = paint(call, k, tiles, rows) | paint(call, 1, columns, rows)
    return expected if plan.carry is None else expected & ~plan.carry.region.to_dense()


@given(call=CALLS, data=DATA, size=BUDGETS, sink=st.integers(0, 2), local=st.integers(0, 2))
def test_ceiling(call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any], sink: int, local: int) -> None:
    plan = data.draw(prioritised(call))
    after = refined(sp.BudgetCeiling(**size, sink=sink, local=local), call, plan)
    assert torch.equal(capped(call, plan, size, sink, local), after.mask.to_dense())
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
        room = (budget(one, size, math.floor)) * one.k - len(found) * one.k - len(stripes)
        assert room >= 0 or (found == one.own and not stripes)
        assert room < one.k or one.have <= found
        lists = [] if plan.mask.stripes is None else stripes_of(plan.mask, b, h, i * one.q // plan.mask.group_rows)
        dropped = {y for y in lists if y // one.k in one.reach - found} - stripes
        assert room <= 0 or not dropped


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
def test_a_ceiling_over_many_tiles(share: float) -> None:
    """Up to 24 tiles of 8 tokens, with stripes of any worth between them, another for each group of 16 rows."""
    call, source = make(160, 192, heads=1, kv_heads=1), torch.Generator().manual_seed(0)
    tiles = torch.rand(1, 1, 20, 24, generator=source)
    columns = torch.rand(1, 1, 10, 192, generator=source) / 8
    keep = torch.rand(1, 1, 10, 192, generator=source) < 0.3
    mask = sp.SparseMask.from_stripes(call, keep, 2, 8, diagonal=False) | sp.SparseMask.full(call, 8)
    priority = sp.PriorityScores(tiles=tiles, tile_q=8, tile_k=8, columns=columns, rows=16)
    plan, ceiling = sp.Plan(mask, priority=priority), sp.BudgetCeiling(share=share)
    found = refined(ceiling, call, plan).mask
    assert torch.equal(capped(call, plan, {"share": share}, 1, 1), found.to_dense())
    assert found.tile_map()[0, 0, 19].sum() > 24 * share - 4


def test_a_diagonal_tile_that_is_added_leaves_out_the_stripes_of_a_carry() -> None:
    call, keep = make(64), torch.zeros(1, 1, 1, 64, dtype=torch.bool)
    keep[..., 27] = True
    region = sp.SparseMask.from_stripes(call, keep, 8, 8, diagonal=False)
    carry = sp.Carry(sp.ReferenceExecutor().accumulate(call, sp.Plan(region)), region)
    after = refined(sp.BudgetCeiling(tiles=1), call, sp.Plan(sp.SparseMask.empty(call, 8), carry)).mask.to_dense()
    expected = sp.SparseMask.from_rules(call, 8, band=0).to_dense()
    expected[..., 27] = False
    assert torch.equal(expected, after)


@pytest.mark.parametrize("length", [257, 331, 600])
def test_lengths_that_no_block_divides_add_no_stripes(length: int) -> None:
    """Columns are ordered in blocks, the last of which may reach beyond the keys: nothing there is a stripe."""
    call = make(length, heads=4, kv_heads=2, dtype=torch.float64)
    one = sp.default_registry().get("anchor-attention")
    plan = one.pipeline(**one.small).plan(call, sp.Memory())
    after = refined(sp.BudgetCeiling(tiles=9), call, plan)
    assert not (whole(after) & ~whole(plan)).any()


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
    from sparseprefill.refiners.narrow import highest

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
    monkeypatch.setattr(priority, "ENTRIES", 1)
    for blocks in (3, 20):
        monkeypatch.setattr(fit, "BLOCKS", blocks)
        assert torch.equal(expected.to_dense(), refined(ceiling, call, plan).mask.to_dense())


def test_so_many_lists_at_a_time_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 lists the counts of 256 blocks in 64 tiles, of 2 or 3 at once; alone where one is too much."""
    call, sizes, make_order = make(512), list[int](), fit._Order.of

    def noted(*given: Any) -> Any:
        order = make_order(*given)
        sizes.append(order.counts.numel())
        return order

    keep = torch.arange(512) % 3 == 0
    plan = sp.Plan(sp.SparseMask.from_stripes(call, keep.expand(1, 1, 4, -1), 16, 8))
    expected = refined(sp.BudgetCeiling(tiles=9), call, plan).mask.to_dense()
    monkeypatch.setattr(fit._Order, "of", noted)
    for entries, wanted in ((1, [1] * 8), (2 << 14, [2] * 4), (3 << 14, [3, 1] * 2), (8 << 14, [8])):
        monkeypatch.setattr(fit, "ENTRIES", entries)
        assert torch.equal(expected, refined(sp.BudgetCeiling(tiles=9), call, plan).mask.to_dense())
        assert [n << 14 for n in wanted] == sizes
        sizes.clear()
