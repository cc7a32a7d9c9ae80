"""PositionDecay, RelativeThreshold and ValueWeights against their oracles, and their laws on any plan."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.plugins.flashprefill import threshold
from sparseprefill.plugins.stem.values import WeightedPriority

import sparseprefill as sp
from helpers.build import make
from helpers.plans import CALLS, KINDS, Positions, refined, whole
from helpers.tile_sets import Tiles, Worth, each, grid, paint, prioritised, stripes_of
from oracles.flashprefill import above
from oracles.stem import bonuses, budget, decayed, tile_weight
from sparseprefill.testing import calls

DATA = st.data()
SIXTHS = st.integers(0, 10**6).map(lambda x: x / 10**6)
BUDGETS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"tiles": st.integers(1, 6)}),
    st.fixed_dictionaries({"share": st.sampled_from([0.0, 0.29, 0.5, 1.0]) | SIXTHS}),
    st.just({}),
)
DECAYS = st.sampled_from([0.7, 1.0, 0.0]) | SIXTHS
SHARES = st.sampled_from([0.25, 0.5, 1.0, 0.0])
ENDS = st.fixed_dictionaries({"sink": st.integers(0, 2), "local": st.integers(0, 2)})
LENGTHS = (1, 2, 127, 128, 129, 257, 131)


def scored(call: sp.AttentionCall, data: st.DataObject, kinds: tuple[str, ...] = KINDS) -> sp.Plan:
    """A plan with scores; some of its tiles and stripes have NaN."""
    plan: sp.Plan = data.draw(prioritised(call, kinds=kinds, bare=False))
    return plan


def with_prompt(call: sp.AttentionCall, data: st.DataObject) -> sp.AttentionCall:
    """The call alone, or as a chunk of a longer prompt."""
    more = data.draw(st.none() | st.integers(0, 40), label="tokens behind the call")
    if more is None:
        return call
    lengths = more + torch.full((call.q.shape[0],), call.kv_len, dtype=torch.int32)
    given = data.draw(st.just(more + call.kv_len) | st.just(lengths))
    return evolve(call, prompt_lengths=given)


def tokens(call: sp.AttentionCall, b: int) -> int:
    """Tokens of the prompt of a batch row."""
    if call.prompt_lengths is not None:
        given = call.prompt_lengths
        return int(given[b]) if isinstance(given, torch.Tensor) else given
    return end(call, b)


def end(call: sp.AttentionCall, b: int) -> int:
    """Position behind the last real query of a batch row."""
    at = Positions.of(call)
    return int(at.query[b, 0][at.allowed[b, 0].any(-1)].max()) + 1


class Row:
    """One query tile of one head in sets: what it has, what stays, and what all of it is worth."""

    def __init__(
        self, call: sp.AttentionCall, plan: sp.Plan, at: tuple[int, int, int], sink: int = 0, local: int = 0
    ) -> None:
        (b, h, i), mask = at, plan.mask
        self.one = Tiles(call, plan, b, h, i)
        k, own = self.one.k, self.one.own - self.one.region
        near = range(self.one.first - local, self.one.first)
        self.ends = own | {j for j in self.one.have if j < sink or j in near}
        worth = Worth(plan, b, h, i * self.one.q, k)
        self.worth = {j: worth.tile(j) for j in self.one.reach}
        group = i * self.one.q // mask.group_rows
        self.first = group * mask.group_rows
        columns = Worth(plan, b, h, self.first, k)
        self.listed = [] if mask.stripes is None else stripes_of(mask, b, h, group)
        low = 0 if call.window is None else max(0, self.first - call.window + 1)
        every = {*range(low, min(self.first + mask.group_rows, call.kv_len)), *self.listed}
        self.columns = {y: columns.column(y) for y in every}
        self.seen = {y: x for y, x in self.columns.items() if low <= y < self.first + mask.group_rows}


Chosen = dict[tuple[int, int, int], set[int]]
"""Key tiles, or columns, by batch row, head and query tile."""


def painted(call: sp.AttentionCall, plan: sp.Plan, tiles: Chosen, columns: Chosen) -> torch.Tensor:
    """The pairs of what was chosen, but those of the plan's carry."""
    q, k = grid(plan)
    rows = each(call, q)
    pairs = paint(call, k, tiles, rows) | paint(call, 1, columns, rows)
    return pairs if plan.carry is None else pairs & ~plan.carry.region.to_dense()


@given(call=CALLS, data=DATA, size=BUDGETS, decay=DECAYS, ends=ENDS)
def test_decay(
    call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any], decay: float, ends: dict[str, int]
) -> None:
    call = with_prompt(call, data)
    plan = scored(call, data)
    q, k = grid(plan)
    tiles, columns = Chosen(), Chosen()
    for b, h, i, _ in each(call, q):
        row = Row(call, plan, (b, h, i), **ends)
        one, n = row.one, max(1, -(-tokens(call, b) // k))
        last = min(((i + 1) * q - 1) // k, n - 1)
        room = budget(last, n, size.get("tiles"), size.get("share"), decay) - len(one.region)
        free = one.reach - row.ends - one.region - one.own
        stripes = {y: row.columns[y] for y in row.listed if y // k in free}
        have = {j for j in one.have if j * k < end(call, b)}  # what lies behind takes nobody's place
        tiles[b, h, i], columns[b, h, i] = decayed(have, row.ends, row.worth, stripes, room, k)
    expected = painted(call, plan, tiles, columns)
    after = refined(sp.PositionDecay(**size, decay=decay, **ends), call, plan)
    assert torch.equal(expected, after.mask.to_dense())


@given(call=CALLS, data=DATA, share=SHARES, ends=ENDS)
def test_threshold(call: sp.AttentionCall, data: st.DataObject, share: float, ends: dict[str, int]) -> None:
    plan = scored(call, data)
    q, _ = grid(plan)
    tiles, columns = Chosen(), Chosen()
    for b, h, i, _ in each(call, q):
        row = Row(call, plan, (b, h, i), **ends)
        tiles[b, h, i] = above(row.one.have, row.worth, share) | row.ends
        scores = {**dict.fromkeys(row.listed, -math.inf), **row.seen}
        columns[b, h, i] = above(row.listed, scores, share)
    expected = painted(call, plan, tiles, columns)
    after = refined(sp.RelativeThreshold(share, **ends), call, plan)
    if share == 0:
        assert after is plan
        return
    assert torch.equal(expected, after.mask.to_dense())
    with patch.object(threshold, "ENTRIES", data.draw(st.sampled_from([1, 3 * call.q.shape[0] * call.kv_len]))):
        assert torch.equal(expected, refined(sp.RelativeThreshold(share, **ends), call, plan).mask.to_dense())


VALUED = calls(max_len=70, max_heads=4, head_dims=(3,), max_batch=2, dtypes=(torch.float64,))


@given(call=VALUED, data=DATA, beta=st.sampled_from([0.2, 0.0, 1.5]), pool=st.sampled_from([1, 2, 4]))
def test_weights(call: sp.AttentionCall, data: st.DataObject, beta: float, pool: int) -> None:
    """On scores of 1, so that what is left is the weight; a value is NaN, others differ by far."""
    g, source = call.geometry, torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    v = call.v * torch.rand(*call.v.shape[:3], 1, generator=source).double().exp().pow(3)
    v[:, :, data.draw(st.integers(0, call.kv_len - 1))] = data.draw(st.sampled_from([math.nan, math.inf, 0.0]))
    call = evolve(call, v=v)
    tile_q, tile_k = data.draw(st.sampled_from([4, 8])), data.draw(st.sampled_from([4, 12]))
    ones = sp.PriorityScores(
        tiles=torch.ones(call.q.shape[0], 1, g.tile_rows(4), g.tile_columns(4)).double() * 4, tile_q=4, tile_k=4
    )
    priority = WeightedPriority(ones, beta, pool)
    tiles = priority.tile_scores(call, tile_q, tile_k)
    heads = call.q.shape[1]
    for b, h, i, _ in each(call, tile_q):
        start = 0 if call.starts is None else int(call.starts[b])
        values = call.v[b, h // call.group, start:].tolist()
        bonus = bonuses(values, i * tile_q, pool, beta)
        row = i - int(g.first_tile(tile_q)[b])
        wanted = [
            tile_weight(bonus, j, tile_k, pool, i * tile_q)
            for j in range(min(i * tile_q // tile_k + 1, tiles.shape[3]))
        ]
        # Lengths that hardly differ leave few digits of their spread.
        assert wanted == pytest.approx(tiles[b, h, row, : len(wanted)].tolist(), rel=1e-7)
        position = torch.full((call.q.shape[0], 1), i * tile_q)
        found = priority.column_scores(call, position, slice(h, h + 1))[b, 0, 0, : len(values)]
        assert [math.exp(bonus[y // pool]) for y in range(len(values))] == pytest.approx(found.tolist(), rel=1e-7)
    assert (call.q.shape[0], heads) == tuple(tiles.shape[:2])


def kept(refiner: sp.MaskRefiner, call: sp.AttentionCall, plan: sp.Plan) -> torch.Tensor:
    return whole(refined(refiner, call, plan))


ANY = st.one_of(
    st.builds(lambda size, decay: sp.PositionDecay(**size, decay=decay), BUDGETS, DECAYS),
    st.builds(sp.RelativeThreshold, SHARES | SIXTHS),
    st.builds(sp.ValueWeights, st.sampled_from([0.2, 2.0])),
)


@given(call=CALLS, data=DATA, refiner=ANY)
def test_nothing_is_added_but_the_diagonal(
    call: sp.AttentionCall, data: st.DataObject, refiner: sp.MaskRefiner
) -> None:
    plan = scored(call, data)
    q, k = grid(plan)
    at = Positions.of(call)
    own = (at.key // k >= at.query // q * q // k) & (at.key // k <= (at.query // q * q + q - 1) // k)
    after = kept(refiner, call, plan)
    assert not bool((after & ~whole(plan) & ~own).any())
    if not isinstance(refiner, sp.ValueWeights) and refiner != sp.RelativeThreshold(0.0):
        diagonal = (at.query == at.key) & at.allowed
        assert bool((after | ~diagonal).all())


@given(call=CALLS, data=DATA, shares=st.lists(SIXTHS | SHARES, min_size=2, max_size=4))
def test_a_higher_threshold_keeps_less(call: sp.AttentionCall, data: st.DataObject, shares: list[float]) -> None:
    plan = scored(call, data)
    found = [kept(sp.RelativeThreshold(share), call, plan) for share in sorted(shares) if share > 0]
    for more, less in pairwise(found):
        assert not bool((less & ~more).any())


@given(call=CALLS, data=DATA, size=BUDGETS, more=st.integers(0, 4), decays=st.lists(DECAYS, min_size=2, max_size=2))
def test_a_larger_budget_keeps_more(
    call: sp.AttentionCall, data: st.DataObject, size: dict[str, Any], more: int, decays: list[float]
) -> None:
    """Of tiles. (With stripes a tile that fits may take the place of several of them.)"""
    plan = scored(call, data, ("tiles",))
    larger: dict[str, Any] = {
        name: x + more if name == "tiles" else min(1.0, x + more / 10) for name, x in size.items()
    }
    low, high = sorted(decays)
    less = kept(sp.PositionDecay(**size, decay=low), call, plan)
    for other in (sp.PositionDecay(**larger, decay=low), sp.PositionDecay(**size, decay=high)):
        assert not bool((less & ~kept(other, call, plan)).any())


@given(call=CALLS, data=DATA)
def test_what_cannot_bite_leaves_everything(call: sp.AttentionCall, data: st.DataObject) -> None:
    tile = data.draw(st.just(8) | st.just((8, 4)))
    full = evolve(scored(call, data), carry=None, mask=sp.SparseMask.full(call, tile))
    for refiner in (sp.PositionDecay(share=1.0, decay=1.0), sp.PositionDecay(), sp.RelativeThreshold(0.0)):
        assert torch.equal(whole(full), kept(refiner, call, full))
    weighted = refined(sp.ValueWeights(pool=4), call, full)
    assert weighted.mask is full.mask


@given(call=CALLS, data=DATA, refiner=ANY)
def test_of_nothing_the_diagonal_is_left(call: sp.AttentionCall, data: st.DataObject, refiner: sp.MaskRefiner) -> None:
    empty = evolve(scored(call, data), carry=None, mask=sp.SparseMask.empty(call, 8))
    if isinstance(refiner, sp.ValueWeights) or refiner == sp.RelativeThreshold(0.0):
        assert not kept(refiner, call, empty).any()
        return
    own = sp.SparseMask.from_tiles(call, torch.zeros(1, 1, 1, 1, dtype=torch.bool), 8).to_dense()
    assert torch.equal(own, kept(refiner, call, empty))


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_and_groups(length: int, group: int) -> None:
    """xattention with every key, and a budget or threshold that chooses alone: counted by hand, tile by tile."""
    call = make(length, heads=4, kv_heads=4 // group, seed=length, dtype=torch.float64)
    every = sp.build("xattention", stride=4, threshold=1.0, block=16)
    plan = every.plan(call, sp.Memory())
    assert plan.priority is not None
    scores = plan.priority.tile_scores(call, 16, 16)
    n = -(-length // 16)
    decay = evolve(every, refiners=(sp.PositionDecay(tiles=2, decay=0.5, sink=1, local=1),)).run(call)
    relative = evolve(every, refiners=(sp.RelativeThreshold(0.5, sink=1, local=0),)).run(call)
    for h in range(4):
        for i in range(n):
            row = scores[0, h, i, : i + 1].tolist()
            order = sorted((-score, -j) for j, score in enumerate(row))
            best = [-j for _, j in order[: budget(i, n, 2, None, 0.5)]]
            assert {*best, 0, i, max(0, i - 1)} == set(decay.mask.tile_map()[0, h, i].nonzero()[:, 0].tolist())
            high = {j for j in range(i + 1) if row[j] >= 0.5 * max(row)}
            assert high | {0, i} == set(relative.mask.tile_map()[0, h, i].nonzero()[:, 0].tolist())


CHUNKED = [
    (sp.PositionDecay(share=0.2),),
    (sp.PositionDecay(tiles=3, decay=0.2),),
    (sp.RelativeThreshold(0.4, sink=1, local=1),),
    (sp.ValueWeights(1.0), sp.PositionDecay(share=0.2, sink=0, local=0)),
    (sp.ValueWeights(1.0), sp.RelativeThreshold(0.6, sink=0, local=0)),
]


@pytest.mark.parametrize("refiners", CHUNKED, ids=lambda ones: "+".join(type(one).__name__ for one in ones))
@pytest.mark.parametrize("method", ["xattention", "bfla", "anchor-attention", "streaming"])
def test_chunks_that_know_the_prompt_are_the_whole(method: str, refiners: tuple[sp.MaskRefiner, ...]) -> None:
    call = make(331, heads=4, kv_heads=2, seed=3, dtype=torch.float64)
    one = sp.default_registry().get(method)
    inner = one.pipeline(**{**one.small, **((method != "anchor-attention" and one.full) or {})})
    pipeline = evolve(inner, refiners=refiners)
    assert pipeline.grain is not None
    assert pipeline.grain == inner.estimator.grain  # type: ignore[attr-defined]
    expected = pipeline.run(call).mask.to_dense()
    cuts = [0, *range(pipeline.grain, 331, -(-90 // pipeline.grain) * pipeline.grain), 331]
    for first, end in pairwise(cuts):
        chunk = sp.AttentionCall(
            call.q[:, :, first:end], call.k[:, :, :end], call.v[:, :, :end], q_offset=first, prompt_lengths=331
        )
        assert torch.equal(expected[:, :, first:end, :end], pipeline.run(chunk).mask.to_dense())


def test_later_values_have_no_say() -> None:
    """The weights of a query tile are those of the keys before it: NaN and other numbers behind change nothing."""
    call = make(200, heads=2, kv_heads=1, dtype=torch.float64)
    plain = sp.build("xattention", stride=4, threshold=1.0, block=16).plan(call, sp.Memory())
    before = refined(sp.ValueWeights(1.0), call, plain).priority
    assert before is not None
    scores = before.tile_scores(call, 16, 16)
    assert not torch.equal(plain.priority.tile_scores(call, 16, 16), scores)  # type: ignore[union-attr]
    for value in (math.nan, 1e9):
        v = call.v.clone()
        v[:, :, 96:] = value
        changed = evolve(call, v=v)
        after = refined(sp.ValueWeights(1.0), changed, plain).priority
        assert after is not None
        assert torch.equal(scores[:, :, :7, :6], after.tile_scores(changed, 16, 16)[:, :, :7, :6])


def test_equal_values_change_nothing() -> None:
    call = make(200, heads=2, kv_heads=1)
    call = evolve(call, v=torch.full_like(call.v, 0.37))
    plan = sp.build("xattention", stride=4, threshold=1.0, block=16).plan(call, sp.Memory())
    weighted = refined(sp.ValueWeights(1.0), call, plan).priority
    assert plan.priority is not None
    assert weighted is not None
    assert torch.equal(plan.priority.tile_scores(call, 16, 16), weighted.tile_scores(call, 16, 16))


def test_large_values_decide_between_equal_scores() -> None:
    """Tiles of one score: those with large values stay."""
    call = make(256, heads=2, kv_heads=1)
    v = torch.ones_like(call.v) * (1 + torch.rand(1, 1, 256, 1, generator=torch.Generator().manual_seed(0)) / 100)
    v[:, :, 64:80] *= 50
    call = evolve(call, v=v)
    even = sp.PriorityScores(tiles=torch.ones(1, 1, 16, 16), tile_q=16, tile_k=16)
    plan = sp.Plan(sp.SparseMask.full(call, 16), priority=even)
    ends = {"sink": 0, "local": 0}
    for choose in (sp.PositionDecay(tiles=1, decay=1.0, **ends), sp.RelativeThreshold(0.9, **ends)):
        after = refined(choose, call, refined(sp.ValueWeights(1.0), call, plan))
        for i in range(6, 16):
            assert [4, i] == after.mask.tile_map()[0, 0, i].nonzero()[:, 0].tolist()


@given(
    tokens=st.integers(1, 40000),
    tile=st.sampled_from([16, 64, 128]),
    size=BUDGETS,
    chunk=st.integers(1, 300),
    known=st.sampled_from(["nothing", "number", "tensor"]),
)
def test_the_bound_on_the_host_holds(tokens: int, tile: int, size: dict[str, Any], chunk: int, known: str) -> None:
    """What is known of a budget without asking the device is never below it."""
    q = torch.zeros(1, 1, min(chunk, tokens), 1)
    end = max(1, tokens // 2)
    prompt = {"nothing": None, "number": tokens, "tensor": torch.tensor([tokens], dtype=torch.int32)}[known]
    q = q[:, :, : min(q.shape[2], end)]
    k = torch.zeros(1, 1, end, 1)
    call = sp.AttentionCall(q, k, k, prompt_lengths=prompt)
    one = sp.PositionDecay(**size)
    columns = call.geometry.tile_columns(tile)
    assert int(one.budget(call, tile, tile).clamp(max=columns).max()) <= one._most(call, tile) <= columns


@pytest.mark.parametrize("length", [90, 128])
@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_the_threshold_of_stripes_by_hand(length: int, share: float) -> None:
    """Two stripes a head with scores of their own, beside tiles that are all kept or all dropped."""
    call = make(length, heads=2, kv_heads=1)
    columns = torch.zeros(1, 2, 1, length, dtype=torch.bool)
    columns[0, 0, 0, [3, 40]] = columns[0, 1, 0, [7, 8]] = True
    mask = sp.SparseMask.from_stripes(call, columns, 8, 16, diagonal=False)
    worth = torch.zeros(1, 2, 1, length)
    worth[0, 0, 0, 3], worth[0, 0, 0, 40], worth[0, 1, 0, 7], worth[0, 1, 0, 8] = 1.0, 0.2, 0.04, 0.5
    tiles = torch.zeros(1, 1, 1, -(-length // 16))
    scores = sp.PriorityScores(tiles=tiles, columns=worth, tile_q=length, tile_k=16)
    after = refined(sp.RelativeThreshold(share, sink=0, local=0), call, sp.Plan(mask, priority=scores))
    assert after.mask.stripes is not None
    expected = {0.05: {(0, 3), (0, 40), (1, 7), (1, 8)}, 0.3: {(0, 3), (1, 8)}, 1.0: {(0, 3), (1, 8)}}[share]
    seen = after.mask.to_dense()[0, :, -1]
    assert expected == {(h, k) for h, k in seen.nonzero().tolist() if k < 64}
    assert sp.Plan(sp.SparseMask.full(call, 16)).mask.stripes is None
    bare = refined(sp.RelativeThreshold(share), call, sp.Plan(sp.SparseMask.full(call, 16), priority=scores))
    assert bare.mask.stripes is None
