"""Rescues against rules written for single pairs of positions; on any mask, with and without a carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import make
from helpers.plans import CALLS, Positions, plans, refined, tile_of, whole
from oracles.bfla import RANDOM, STRIDE, hash_words
from sparseprefill.mask import tile_map as hashing

DATA = st.data()
TILES = st.none() | st.sampled_from([8, 12, 64])
SEEDS = st.integers(0, 2**63 - 1)


@given(call=CALLS, data=DATA, tiles=st.integers(0, 4), tile=TILES)
def test_local_band(call: sp.AttentionCall, data: st.DataObject, tiles: int, tile: int | None) -> None:
    plan, at = data.draw(plans(call)), Positions.of(call)
    tile_q, tile_k = tile_of(plan.mask, tile)
    low = at.query // tile_q * tile_q // tile_k - tiles
    band = (at.key // tile_k >= low) & (at.key // tile_k <= (at.query // tile_q * tile_q + tile_q - 1) // tile_k)
    expected = whole(plan) | (band & at.allowed)
    assert torch.equal(expected, whole(refined(sp.LocalBand(tiles, tile=tile), call, plan)))


@given(call=CALLS, data=DATA, tiles=st.integers(0, 4), tile=TILES)
def test_sink(call: sp.AttentionCall, data: st.DataObject, tiles: int, tile: int | None) -> None:
    plan, at = data.draw(plans(call)), Positions.of(call)
    expected = whole(plan) | ((at.key < tiles * tile_of(plan.mask, tile)[1]) & at.allowed)
    assert torch.equal(expected, whole(refined(sp.Sink(tiles, tile=tile), call, plan)))


def by_hash(call: sp.AttentionCall, tile_q: int, tile_k: int, rule: Any) -> torch.Tensor:
    """bool ``[B, Hq, Nq, Nkv]``: the rule of (head, query tile, key tile), pair by pair of tiles."""
    at = Positions.of(call)
    keep = torch.zeros(at.allowed.shape[0], call.q.shape[1], *at.allowed.shape[2:], dtype=torch.bool)
    rows, columns = (at.query // tile_q)[:, 0, :, 0], (at.key // tile_k)[:, 0, 0]
    for b in range(keep.shape[0]):
        for h in range(keep.shape[1]):
            for i in rows[b].unique().tolist():
                for j in columns[b].unique().tolist():
                    if rule(h, i, j):
                        keep[b, h] |= (rows[b] == i)[:, None] & (columns[b] == j)
    return keep & at.allowed


@given(call=CALLS, data=DATA, every=st.integers(1, 9), tile=TILES, seed=SEEDS)
def test_stride(call: sp.AttentionCall, data: st.DataObject, every: int, tile: int | None, seed: int) -> None:
    plan = data.draw(plans(call))
    words = (STRIDE, seed % 2**32, seed >> 32, call.layer)
    rule = by_hash(call, *tile_of(plan.mask, tile), lambda h, i, j: (j + hash_words((*words, h, i))) % every == 0)
    assert torch.equal(whole(plan) | rule, whole(refined(sp.StrideRescue(every, seed, tile=tile), call, plan)))


@given(call=CALLS, data=DATA, share=st.sampled_from([0.0, 1.0]) | st.floats(0, 1), tile=TILES, seed=SEEDS)
def test_random(call: sp.AttentionCall, data: st.DataObject, share: float, tile: int | None, seed: int) -> None:
    plan = data.draw(plans(call))
    words = (RANDOM, seed % 2**32, seed >> 32, call.layer)
    rule = by_hash(call, *tile_of(plan.mask, tile), lambda h, i, j: hash_words((*words, h, i, j)) < int(share * 2**32))
    assert torch.equal(whole(plan) | rule, whole(refined(sp.RandomRescue(share, seed, tile=tile), call, plan)))


RESCUES: tuple[Any, ...] = (sp.LocalBand(2), sp.Sink(2), sp.StrideRescue(4, 9), sp.RandomRescue(0.3, 9))


@pytest.mark.parametrize("refiner", RESCUES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("cut", [1, 8, 21, 64])
def test_the_rescue_set_does_not_change_with_chunking(refiner: Any, cut: int) -> None:
    pipeline = sp.Pipeline(sp.build("streaming", sink=8, window=8, block=8).estimator, refiners=(refiner,))
    q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
    assert pipeline.grain == 1
    together = pipeline.run(sp.AttentionCall(q, k, v, layer=3)).mask.to_dense()
    after = pipeline.run(sp.AttentionCall(q[:, :, cut:], k, v, layer=3)).mask.to_dense()
    before = pipeline.run(sp.AttentionCall(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], layer=3)).mask.to_dense()
    assert torch.equal(together[:, :, cut:], after)
    assert torch.equal(together[:, :, :cut, :cut], before)


def test_stride_keeps_one_of_any_neighbours() -> None:
    call = make(800, heads=4)
    mask = refined(sp.StrideRescue(5, tile=8), call, sp.Plan(sp.SparseMask.empty(call, 8))).mask
    tiles = mask.tile_map()[0, :, -1]
    counts = {int(tiles[0, j : j + 5].sum()) for j in range(96)}
    expected = {1}
    assert expected == counts
    phases = {int(row.nonzero()[0, 0]) for row in mask.tile_map()[0, :, 20:].flatten(0, 1)}
    every = {0, 1, 2, 3, 4}
    assert every == phases


def tiles_kept(seed: int, layer: int) -> torch.Tensor:
    call = make(2048, heads=4, layer=layer)
    plan = refined(sp.RandomRescue(0.25, seed, tile=16), call, sp.Plan(sp.SparseMask.empty(call, 16)))
    return plan.mask.tile_map()[0]


def test_random_keeps_its_share_and_neighbours_are_uncorrelated() -> None:
    """Of the lower triangle of 128 x 128 tiles, four heads: 33 024 tiles, so a share within +-0.01 is 4 sigma."""
    keep = tiles_kept(0, 0).double()
    lower = torch.ones(128, 128, dtype=torch.bool).tril()
    assert keep[:, lower].mean() == pytest.approx(0.25, abs=0.01)
    inside = torch.ones(128, 128, dtype=torch.bool).tril(-1)
    others = [keep.roll(1, 1), keep.roll(1, 2), keep.roll(1, 0), tiles_kept(1, 0).double(), tiles_kept(0, 1).double()]
    for other in others:
        pair = torch.stack([keep[:, inside][:, 200:].flatten(), other[:, inside][:, 200:].flatten()])
        assert torch.corrcoef(pair)[0, 1] == pytest.approx(0.0, abs=0.03)


def test_the_hash_moves_half_of_its_bits() -> None:
    x = torch.arange(1 << 15) * 131_071 % 2**32
    for bit in range(32):
        changed = hashing.mix(x) ^ hashing.mix(x ^ (1 << bit))
        share = torch.stack([(changed >> out & 1).double().mean() for out in range(32)])
        assert float((share - 0.5).abs().max()) < 0.03


def test_the_hash_of_tensors_is_the_hash_of_integers() -> None:
    """Known words, so that a rescued set stays what it was from version to version."""
    words = [0, 1, 2**31, 2**32 - 1, 123_456_789]
    expected = [hash_words((0, word)) for word in words]
    state = torch.full((5,), hash_words((0,)))
    assert expected == hashing.fold(state, torch.tensor(words)).tolist()
    assert expected == [hashing.fold(hash_words((0,)), word) for word in words]
    assert torch.equal(
        torch.tensor(expected) < 2**31, hashing.fold(state, torch.tensor(words) - 2**32).lt(2**31)
    )  # a negative index counts as its low 32 bits


@pytest.mark.gpu
def test_the_hash_has_the_same_bits_on_the_gpu() -> None:
    x = torch.arange(1 << 20)
    assert torch.equal(hashing.mix(x), hashing.mix(x.cuda()).cpu())
    call = make(300, heads=4)
    begun = hashing.layer_hash(hashing.RANDOM, 2**40 + 3, 7)
    states = hashing.row_hash(call.geometry, 16, begun)
    assert torch.equal(hashing.hashed_below(states, 50, 2**30), hashing.hashed_below(states.cuda(), 50, 2**30).cpu())


def test_chunks_of_the_hash_are_the_whole() -> None:
    states = torch.arange(2 * 3 * 7).view(2, 3, 7)
    assert torch.equal(hashing.hashed_below(states, 11, 2**31), hashing.hashed_below(states, 11, 2**31, entries=1))


@pytest.mark.parametrize("make_one", [lambda seed: sp.RandomRescue(0.5, seed), lambda seed: sp.StrideRescue(7, seed)])
def test_every_bit_of_a_seed_counts(make_one: Any) -> None:
    call = make(320, heads=2)
    plan = sp.Plan(sp.SparseMask.empty(call, 8))
    seeds = [0, *(1 << bit for bit in range(63)), 2**63 - 1]
    found = {refined(make_one(seed), call, plan).mask.tile_map().numpy().tobytes() for seed in seeds}
    assert len(found) == len(seeds)
