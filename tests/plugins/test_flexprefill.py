"""FlexPrefill against Algorithms 1-4 by brute force: masks bit for bit, outputs to rounding."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.flexprefill import FlexConfig
from torch import Tensor

import sparseprefill as sp
from oracles import flexprefill as oracle
from oracles.classic import Keep
from oracles.drawn import Made, call, calls, compare, run
from oracles.flexprefill import Parameters
from sparseprefill.statistics.pooled import js_distance

PARAMETERS = st.builds(
    Parameters,
    gamma=st.sampled_from([0.0, 1.0]) | st.floats(0.05, 0.99),
    tau=st.sampled_from([0.0, 0.15, 0.2, 0.3, 2.0]),
    block=st.integers(2, 40),
    min_budget=st.sampled_from([0, 0, 1, 30, 100]),
    max_budget=st.sampled_from([None, None, 100, 130]),
    coverage=st.sampled_from(["row", "row", "global"]),
)


def check(made: Made, p: Parameters, window: int | None = None) -> sp.Result:
    def make(q: Tensor, k: Tensor, first: int, scale: float, softcap: float | None) -> Keep:
        return oracle.algorithm_1(oracle.Head(q, k, first, scale, softcap, window), p)

    return compare(sp.build("flexprefill", **vars(p)), made, make, window=window)


def ours(p: Parameters, made: Made) -> sp.Result:
    return run(sp.build("flexprefill", **vars(p)), made)


@settings(max_examples=40, deadline=None)
@given(made=calls(300), p=PARAMETERS)
def test_equals_algorithms_1_to_4(made: Made, p: Parameters) -> None:
    check(made, p)


@settings(max_examples=25, deadline=None)
@given(made=calls(90), p=PARAMETERS, window=st.integers(1, 60))
def test_equals_the_algorithms_under_a_sliding_window(made: Made, p: Parameters, window: int) -> None:
    check(made, p, window)


def test_heads_of_one_call_take_different_patterns() -> None:
    made = call(1, (4, 2), 120, 0)
    made["q"] *= torch.tensor([3.0, 0.01, 3.0, 3.0])[:, None, None]  # to the second head all keys look alike
    result = check(made, Parameters(0.6, 0.2, 16))
    assert [False, True, False, False] == result.plan.notes["query_aware"][0].tolist()
    assert result.mask.stripes is not None
    counts = result.mask.stripes.counts[0, :, 0].tolist()
    assert [True, False, True, True] == [count > 0 for count in counts]


@pytest.mark.parametrize("tau", [0.0, 2.0])
def test_tau_decides_the_pattern(tau: float) -> None:
    result = check(call(2, (2, 1), 100, 0), Parameters(0.7, tau, 16))
    assert [tau > 1] * 2 == result.plan.notes["query_aware"][0].tolist()


def test_the_distance_is_the_oracles() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 30, generator=generator, dtype=torch.float64)
    p[:5], q[3:9] = 0, 0
    p, q = p / p.sum(), q / q.sum()
    ours = float(js_distance(p, q)) * math.sqrt(math.log(2))
    assert oracle.jensen_shannon(p.tolist(), q.tolist()) == pytest.approx(ours, abs=1e-12)


def test_tau_is_in_the_units_of_the_authors_release() -> None:
    """Their test, with the natural logarithm, on a head whose distance lies between tau in nats and tau in bits."""
    made = call(1, (1, 1), 120, 0)
    far = float(ours(Parameters(0.6, 0.2, 16), made).plan.notes["distance"])
    q, k = made["q"][0, 0].double(), made["k"][0, 0].double()
    block, first, scale = 16, len(k) - 16, q.shape[-1] ** -0.5
    future = torch.arange(first, first + block)[:, None] < torch.arange(len(k))
    true = (q[-block:] @ k.T * scale).masked_fill(future, -torch.inf).softmax(-1)
    true = torch.stack([part.sum(-1) for part in true.split(block, -1)], -1).mean(0)
    means = torch.stack([part.mean(0) for part in k.split(block)])
    estimate = (means @ q[-block:].mean(0) * scale).softmax(-1)
    m = (true + estimate) / 2
    release = torch.sqrt(0.5 * (true * torch.log(true / m)).sum() + 0.5 * (estimate * torch.log(estimate / m)).sum())
    assert far == pytest.approx(float(release), rel=1e-6)
    between = float(release) * 1.1  # base 2 would put the head at 1.2 times its distance: not query-aware
    assert [[True]] == ours(Parameters(0.6, between, 16), made).plan.notes["query_aware"].tolist()


# Bugs of released code, each as a test.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_js_distance_is_finite_where_mass_is_zero(dtype: torch.dtype) -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]], dtype=dtype)
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=dtype)
    expected = torch.tensor([0.0, 1.0, 0.5579230452841438], dtype=dtype)
    torch.testing.assert_close(expected, js_distance(p, q))


def test_js_distance_takes_the_smallest_masses() -> None:
    p, q = torch.tensor([1.0, 1e-45, 0.0]), torch.tensor([1.0, 0.0, 1e-45])
    assert 0.0 == float(js_distance(p, q))


def test_a_block_without_mass_leaves_its_head_query_aware() -> None:
    """Logits so far apart that all blocks but the first have a mass of exactly 0 in both distributions."""
    made = call(3, (1, 1), 96, 0)
    made["q"][:], made["k"][:] = 100.0, 0.0
    made["k"][:, :, :16] = 10.0
    result = check(made, Parameters(0.9, 0.1, 16))
    assert [[True]] == result.plan.notes["query_aware"].tolist()
    assert [[0.0]] == result.plan.notes["distance"].tolist()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), gamma=st.floats(0.1, 0.99), coverage=st.sampled_from(["row", "global"]))
def test_the_coverage_prefix_is_not_short_of_gamma(seed: int, gamma: float, coverage: str) -> None:
    made = call(seed, (1, 1), 128, 0)
    p = Parameters(gamma, 2.0, 16, coverage=coverage)
    tiles = ours(p, made).mask.tile_map()[0, 0]
    q, k = (made[name][0, 0].unflatten(0, (8, 16)).mean(1) for name in ("q", "k"))
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    scores = (q @ k.T / 8**0.5).masked_fill(future, -torch.inf).softmax(-1)
    kept = (scores * tiles).sum(-1) if coverage == "row" else (scores * tiles).sum() / 8
    assert bool((kept >= gamma - 1e-12).all())


def test_a_slash_bin_keeps_both_tile_diagonals_that_its_pairs_fall_in() -> None:
    """A key at distance 20 of every query, blocks of 16: bin 1, tile diagonals 1 and 2."""
    q = torch.zeros(1, 1, 96, 96, dtype=torch.float64)
    q[0, 0, range(20, 96), range(76)] = 1.0
    k = torch.eye(96, dtype=torch.float64)[None, None] * 500
    result = sp.build("flexprefill", gamma=0.5, tau=0.0, block=16, min_budget=0).run(sp.AttentionCall(q, k, k))
    tiles = result.mask.tile_map()[0, 0]
    lags = {int(r - c) for r, c in tiles.nonzero() if c > 0}
    assert {0, 1, 2} == lags


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), q_len=st.integers(1, 60), before=st.integers(0, 60), tau=st.sampled_from([0.0, 2.0]))
def test_the_diagonal_tile_is_kept_whatever_the_offset(seed: int, q_len: int, before: int, tau: float) -> None:
    made = call(seed, (2, 1), q_len, before)
    result = check(made, Parameters(0.3, tau, 16))
    mask = result.mask.to_dense()[0]
    for row in range(q_len):
        own = slice((before + row) // 16 * 16, before + row + 1)
        assert bool(mask[:, row, own].all())


def test_the_first_tile_is_kept() -> None:
    for tau in (0.0, 2.0):
        mask = ours(Parameters(0.0, tau, 16), call(4, (2, 1), 100, 20)).mask.to_dense()
        assert bool(mask[..., :16].all())


@pytest.mark.parametrize("tau", [0.0, 2.0])
def test_budgets_bound_the_selection(tau: float) -> None:
    made = call(5, (1, 1), 160, 0)
    least = ours(Parameters(0.0, tau, 16, min_budget=40), made).mask
    assert int(least.tile_map()[0, 0, -1].sum()) >= 3
    if tau == 0.0:
        assert least.stripes is not None
        assert [48] == least.stripes.counts.flatten().tolist()
    most = ours(Parameters(1.0, tau, 16, max_budget=32), made).mask
    # Two tiles by score, or two bins of two diagonals; besides them the first tile and the row's own.
    assert int(most.tile_map()[0, 0].sum(-1).max()) <= (4 if tau else 6)


def test_defaults_are_the_papers() -> None:
    defaults: dict[str, Any] = asdict(FlexConfig())
    assert defaults == vars(Parameters(0.95, 0.1, 128, 1024))
