"""SharePrefill against its oracle, layer by layer: masks bit for bit, outputs to rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparseprefill as sp
from helpers.examples import untied
from helpers.layers import Layers, calls, fields_of, run
from oracles import share_prefill as oracle
from sparseprefill.statistics.pooled import js_distance
from sparseprefill.statistics.select import top_mass

TABLES: list[dict[tuple[int, int], int]] = [
    {(layer, head): 0 for layer in range(3) for head in range(4)},
    {(layer, head): head % 2 for layer in range(3) for head in range(4)},
    {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 2, (2, 0): 1, (2, 1): 0, (2, 2): 2, (1, 3): 2},
    {(1, 0): 0, (1, 1): 0, (2, 0): 1},
]


def tensors(seed: int, heads: tuple[int, int], q_len: int, kv_len: int, batch: int = 1, layers: int = 3) -> Layers:
    """float64 q, k, v of each layer. Part of the seeds make heads of all layers look at one set of keys."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    topic, spots = random(8), torch.randint(kv_len, (max(1, kv_len // 8),), generator=generator)
    made = []
    for _ in range(layers):
        q, k, v = (
            random(batch, heads[0], q_len, 8),
            random(batch, heads[1], kv_len, 8),
            random(batch, heads[1], kv_len, 6),
        )
        if seed % 2:
            q = q + 2 * topic
            k[:, :, spots] += topic
        made.append((q, k, v))
    return made


CALLS = calls([(1, 1), (2, 1), (4, 2)], 150, 90, tensors)


def build(table: Any, p: oracle.Parameters) -> sp.Pipeline:
    pipeline: sp.Pipeline = sp.build("share-prefill", clusters=table, **vars(p))
    return pipeline


PARAMETERS = st.builds(
    oracle.Parameters,
    gamma=st.floats(0.05, 0.99).filter(untied) | st.just(1.0),
    tau=st.sampled_from([0.2, 0.35, 0.6, 1.01, 0.0]),
    delta=st.sampled_from([0.4, 0.6, 1.01]),
    block=st.integers(2, 32),
)


@settings(max_examples=50, deadline=None)
@given(made=CALLS, p=PARAMETERS, table=st.sampled_from(TABLES))
def test_equals_the_oracle(made: tuple[Layers, dict[str, Any]], p: oracle.Parameters, table: Any) -> None:
    layers, options = made
    expected = oracle.share_prefill(layers, table, p, **options)
    for truth, result in zip(expected, run(layers, build(table, p), **options), strict=True):
        assert torch.equal(truth.mask, result.mask.to_dense())
        torch.testing.assert_close(truth.out, result.out, rtol=1e-12, atol=1e-12)


def test_the_oracle_meets_every_pattern() -> None:
    """Else the comparison above would say little."""
    p = oracle.Parameters(gamma=0.6, tau=0.35, delta=0.6, block=16)
    found = {
        pattern
        for seed in range(4)
        for answer in oracle.share_prefill(tensors(seed, (4, 2), 150, 150), TABLES[1], p)
        for pattern in answer.patterns[0]
    }
    assert found == {"dense", "shared", "vertical_slash"}


def test_js_distance_is_finite_where_mass_is_zero() -> None:
    """Released code divides by the pivot's mass, and takes the logarithm of 0: NaN, and a comparison that is false."""
    zero, one, both = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.5, 0.5]]).unbind()
    tiny = torch.tensor([1.0, torch.finfo(torch.float32).smallest_normal / 4])
    assert js_distance(one, one) == 0.0
    assert js_distance(one, torch.tensor([1.0, 0.0])) == 1.0
    expected = math.sqrt(0.5 * math.log2(4 / 3) + 0.25 * (1 + math.log2(2 / 3)))
    assert expected == pytest.approx(float(js_distance(one, both)), abs=1e-6)
    for p in (zero, one, both, tiny):
        for q in (zero, one, both, tiny):
            assert 0.0 <= float(js_distance(p, q)) <= 1.0
            assert float(js_distance(p, q)) == float(js_distance(q, p))


def test_a_head_with_empty_blocks_shares() -> None:
    """The whole way: blocks without any mass, on both sides."""
    layers = [
        (torch.ones(1, 1, 64, 8).double() * 40, torch.zeros(1, 1, 64, 8).double(), torch.ones(1, 1, 64, 4).double())
    ]
    layers[0][1][:, :, ::5] += 40
    layers[0][1][:, :, 16:48] -= 40
    results = run(layers * 2, sp.build("share-prefill", clusters="single", delta=1.01, block=16))
    tiles = 4 * 136 + 3 * 256  # diagonal, and block 0 for all others
    assert [results[0].density, results[1].density] == [1.0, tiles / 2080]
    assert int(results[1].mask.stripes.counts.sum()) == 0  # type: ignore[union-attr]


def test_the_covering_set_reaches_gamma() -> None:
    """Released code drops the element that crosses gamma, and sums many small numbers in float32."""
    layers = tensors(1, (1, 1), 400, 400, layers=2)
    gamma = 0.73
    probed: list[Any] = []

    class Spy:
        def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> None:
            probed.append(result.probe)

    pipeline = sp.build("share-prefill", clusters="single", tau=1.01, delta=1.01, gamma=gamma, block=8)
    results = run(layers, evolve(pipeline, observers=(*pipeline.observers, Spy())))
    mass = probed[0][0, 0].double()
    kept = mass * results[1].mask.tile_map()[0, 0]
    assert bool((kept.sum(-1) >= gamma * mass.sum(-1)).all())
    many = torch.full((1 << 22,), 1e-3, dtype=torch.float32).double()
    assert float(many[top_mass(many, 0.9)].sum()) >= 0.9 * float(many.sum())


def test_no_pivot_without_a_later_use() -> None:
    """A cluster whose heads all lie in one layer, the last layer of a cluster, and tau = 0: nobody runs dense."""
    layers = tensors(1, (2, 1), 90, 90)
    options: dict[str, Any] = {"delta": 1.01, "gamma": 0.6, "block": 8}
    expected = [result.mask.to_dense() for result in run(layers, sp.build("vertical-slash", gamma=0.6, block=8))]
    for table, tau in (({(1, 0): 0, (1, 1): 0}, 1.01), (TABLES[0], 0.0)):
        found = run(layers, sp.build("share-prefill", clusters=table, tau=tau, **options))
        assert all(torch.equal(a, b.mask.to_dense()) for a, b in zip(expected, found, strict=True))
    found = run(layers, sp.build("share-prefill", clusters={(0, 0): 0, (1, 0): 0}, tau=1e-9, **options))
    probes = [result.plan.probe is not None for result in found]
    assert probes == [True, False, False]


def test_pivots_serve_one_chunk_and_one_request() -> None:
    """The second chunk, and another request, begin with none; a Memory that is used again does, too."""
    pipeline = sp.build("share-prefill", clusters="single", tau=1.01, delta=1.01, gamma=0.6, block=16)
    layers = tensors(3, (2, 1), 128, 128, layers=2)

    def chunk(first: int, last: int, memory: sp.Memory) -> list[Tensor]:
        calls = [
            sp.AttentionCall(q[:, :, first:last], k[:, :, :last], v[:, :, :last], layer=layer)
            for layer, (q, k, v) in enumerate(layers)
        ]
        return [pipeline.run(call, memory).mask.to_dense() for call in calls]

    memory = sp.Memory()
    pairs = [(0, 64), (64, 128), (64, 128), (0, 128)]
    for first, last in pairs:
        once, alone = chunk(first, last, memory), chunk(first, last, sp.Memory())
        assert all(torch.equal(a, b) for a, b in zip(alone, once, strict=True))
        rows = torch.arange(first, last)
        assert bool(once[0][0, 0].sum() == (rows + 1).sum())  # head 0 of layer 0 is dense in every chunk


def test_threads_do_not_meet() -> None:
    from concurrent.futures import ThreadPoolExecutor

    pipeline = build(TABLES[1], oracle.Parameters(0.6, 0.6, 1.01, 16))
    requests = [tensors(seed, (4, 2), 96, 96) for seed in range(6)]
    expected = [[result.mask.to_dense() for result in run(layers, pipeline)] for layers in requests]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda layers: [result.mask.to_dense() for result in run(layers, pipeline)], requests))
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Finer:
    """A refiner that leaves the selection as it is, on tiles of another size."""

    def __init__(self, tile: tuple[int, int]) -> None:
        self.tile = tile

    def refine(self, call: sp.AttentionCall, plan: sp.Plan, memory: sp.Memory) -> sp.Plan:
        return evolve(plan, mask=plan.mask | sp.SparseMask.from_tiles(call, torch.zeros(1).bool(), self.tile))


@pytest.mark.parametrize("options", [{}, {"q_offset": 21}, {"starts": [5, 0], "lengths": [60, 81]}], ids=str)
def test_a_refiner_may_refine_the_grid(options: dict[str, Any]) -> None:
    batch = 2 if "starts" in options else 1
    layers = tensors(1, (2, 1), 60 if "q_offset" in options else 90, 90, batch, layers=2)
    pipeline = sp.build("share-prefill", clusters="single", tau=1.01, delta=1.01, gamma=0.6, block=16)
    expected = run(layers, pipeline, **options)
    found = run(layers, evolve(pipeline, refiners=(Finer((4, 8)),)), **options)
    assert all(result.mask.tile_q == 4 for result in found)
    assert all(torch.equal(a.mask.to_dense(), b.mask.to_dense()) for a, b in zip(expected, found, strict=True))


def test_a_grid_that_does_not_divide_the_block_is_an_error() -> None:
    class Coarse:
        def refine(self, call: sp.AttentionCall, plan: sp.Plan, memory: sp.Memory) -> sp.Plan:
            return evolve(plan, mask=sp.SparseMask.full(call, 24))

    pipeline = sp.build("share-prefill", clusters="single", delta=1.01, block=16)
    with pytest.raises(sp.StageError, match="24 x 24"):
        run(tensors(1, (2, 1), 90, 90), evolve(pipeline, refiners=(Coarse(),)))


class Narrow:
    """A refiner that takes the first key tile from a query tile of one head, or leaves all heads whole."""

    def __init__(self, head: int | None) -> None:
        self.head = head

    def refine(self, call: sp.AttentionCall, plan: sp.Plan, memory: sp.Memory) -> sp.Plan:
        if call.layer > 0:
            return plan
        keep = torch.zeros(1, call.q.shape[1], call.geometry.tile_rows(16), 1, dtype=torch.bool)
        if self.head is not None:
            keep[:, self.head, 2] = True
        keep = torch.nn.functional.pad(keep, (0, call.geometry.tile_columns(16) - 1))
        return evolve(plan, mask=plan.mask - sp.SparseMask.from_tiles(call, keep, 16, diagonal=False))


@pytest.mark.parametrize("options", [{}, {"starts": [5, 0], "lengths": [60, 81]}], ids=str)
def test_a_head_that_a_refiner_narrowed_makes_no_pivot(options: dict[str, Any]) -> None:
    """Algorithm 2 takes the map of a head that was computed in full."""
    layers = tensors(1, (2, 1), 90, 90, 2 if options else 1, layers=3)
    pipeline = sp.build("share-prefill", clusters="single", tau=1.01, delta=1.01, gamma=0.6, block=16)

    def masks(head: int | None) -> list[Tensor]:
        return [one.mask.to_dense() for one in run(layers, evolve(pipeline, refiners=(Narrow(head),)), **options)]

    plain = [one.mask.to_dense() for one in run(layers, pipeline, **options)]
    assert all(torch.equal(a, b) for a, b in zip(plain, masks(None), strict=True))  # whole, on another mask
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], masks(1)[1:], strict=True))  # it made no pivot anyway
    later = masks(0)
    full = sp.AttentionCall(*layers[1], **fields_of(options)).geometry.visible()
    assert torch.equal(later[1][:, 0], full)  # no pivot yet: the next layer's first head runs dense to make one
    alone = [one.mask.to_dense() for one in run(layers[1:], pipeline, **options)]
    assert all(torch.equal(a, b) for a, b in zip(alone, later[1:], strict=True))
