"""XAttention against Algorithm 1 by brute force: masks bit for bit, outputs to rounding."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.xattention import scores
from sparseprefill.plugins.xattention.stages import all_scores
from torch import Tensor

import sparseprefill as sp
from oracles import xattention as oracle
from oracles.classic import Keep
from oracles.drawn import Made, call, calls, compare, run
from oracles.xattention import Parameters
from sparseprefill.statistics.select import top_mass
from sparseprefill.testing import head_tensors, tensors

PARAMETERS = st.builds(
    lambda stride, groups, threshold, sink: Parameters(stride, threshold, stride * groups, sink),
    stride=st.integers(1, 9),
    groups=st.integers(1, 5),
    threshold=st.sampled_from([0.0, 1.0]) | st.floats(0.05, 0.99),
    sink=st.booleans(),
)


def check(made: Made, p: Parameters, window: int | None = None) -> sp.Result:
    def make(q: Tensor, k: Tensor, first: int, scale: float, softcap: float | None) -> Keep:
        return oracle.algorithm_1(oracle.Head(q, k, first, scale, softcap, window), p)

    return compare(sp.build("xattention", **vars(p)), made, make, window=window)


@settings(max_examples=40, deadline=None)
@given(made=calls(300), p=PARAMETERS)
def test_equals_algorithm_1(made: Made, p: Parameters) -> None:
    check(made, p)


@settings(max_examples=25, deadline=None)
@given(made=calls(90), p=PARAMETERS, window=st.integers(1, 60))
def test_equals_algorithm_1_under_a_sliding_window(made: Made, p: Parameters, window: int) -> None:
    check(made, p, window)


def test_scores_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few logits in memory at once: one query tile at a time."""
    monkeypatch.setattr(scores, "LOGITS", 1)
    for made in (call(1, (4, 2), 150, 37), call(2, (2, 1), 90, 20, 0, 2, starts=[0, 33], lengths=[101, 70])):
        check(made, Parameters(4, 0.7, 16))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    length=st.integers(20, 150),
    cuts=st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True),
)
def test_cuts_at_the_grain_change_nothing(seed: int, length: int, cuts: list[int]) -> None:
    made = call(seed, (2, 1), length, 0)
    pipeline = sp.build("xattention", stride=4, threshold=0.7, block=16)
    assert 16 == pipeline.grain
    whole = run(pipeline, made).mask.to_dense()
    bounds = [0, *sorted(cut * 16 for cut in cuts if cut * 16 < length), length]
    for first, last in pairwise(bounds):
        part = sp.AttentionCall(made["q"][:, :, first:last], made["k"][:, :, :last], made["v"][:, :, :last])
        assert torch.equal(whole[:, :, first:last, :last], pipeline.run(part).mask.to_dense())


def test_every_key_is_on_an_antidiagonal() -> None:
    """One key that all queries look at raises its tile's score, wherever in the tile it stands."""
    for key in range(16, 32):
        q, k = torch.ones(1, 1, 96, 8), torch.zeros(1, 1, 96, 8)
        k[:, :, key] = 60.0
        tiles = sp.build("xattention", stride=4, threshold=0.5, block=16, sink=False).run(sp.AttentionCall(q, k, k))
        assert [1, 5] == tiles.mask.tile_map()[0, 0, 5].nonzero().flatten().tolist()


@pytest.mark.parametrize(("stride", "lag", "met"), [(4, 33, True), (4, 32, False), (5, 33, True), (5, 32, True)])
def test_an_even_stride_meets_diagonals_of_odd_distance_alone(stride: int, lag: int, met: bool) -> None:
    length, block = 120, 20
    q = torch.zeros(1, 1, length, length, dtype=torch.float64)
    q[0, 0, range(lag, length), range(length - lag)] = 1.0
    k = torch.eye(length, dtype=torch.float64)[None, None] * 500
    score = scores.tile_scores(sp.AttentionCall(q, k, k), stride, block)
    last = score[0, 0, -1]
    assert met == bool(last[3:5].sum() > 0.9 * last.sum())


# Bugs of released code, each as a test.


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), threshold=st.floats(0.1, 0.99))
def test_the_coverage_prefix_is_not_short_of_the_threshold(seed: int, threshold: float) -> None:
    made = call(seed, (1, 1), 128, 0)
    one = sp.AttentionCall(made["q"], made["k"], made["v"])
    tiles = sp.build("xattention", stride=4, threshold=threshold, block=16, sink=False).run(one).mask.tile_map()
    score = scores.tile_scores(one, 4, 16)
    assert bool(((score * tiles).sum(-1) >= threshold * score.sum(-1) - 1e-12).all())


def test_the_sink_is_a_column_of_tiles_and_not_a_row() -> None:
    made = call(3, (2, 1), 120, 0)
    tiles = run(sp.build("xattention", stride=4, threshold=0.0, block=16), made).mask.tile_map()[0, 0]
    expected = torch.eye(8, dtype=torch.bool)
    expected[:, 0] = True
    assert torch.equal(expected, tiles)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), q_len=st.integers(1, 60), before=st.integers(0, 60))
def test_the_diagonal_tile_is_kept_whatever_the_offset(seed: int, q_len: int, before: int) -> None:
    mask = check(call(seed, (2, 1), q_len, before), Parameters(4, 0.2, 16)).mask.to_dense()[0]
    for row in range(q_len):
        own = slice((before + row) // 16 * 16, before + row + 1)
        assert bool(mask[:, row, own].all())


def test_the_scale_is_the_calls() -> None:
    made: dict[str, Any] = call(4, (1, 1), 120, 0)
    sharp, flat = (run(sp.build("xattention", stride=4, block=16), made, scale=scale) for scale in (4.0, 1e-6))
    assert sharp.density < flat.density


@pytest.mark.parametrize("kind", ["random", "heads"])
def test_own_tile_and_sink_cost_what_the_page_says(kind: str) -> None:
    """On top of the threshold at most 3 * block / N of all pairs, one third of it without the sink."""
    sizes: dict[str, int] = {"heads": 2, "kv_heads": 1, "q_len": 512, "head_dim": 32}
    q, k, v = head_tensors(**sizes) if kind == "heads" else tensors(kind, batch=1, kv_len=512, **sizes)  # type: ignore[arg-type]
    one, block = sp.AttentionCall(q, k, v), 16
    for threshold in (0.0, 0.5, 0.9):
        keep = top_mass(all_scores(one, 4, block), threshold)
        chosen = sp.SparseMask.from_tiles(one, keep, block, diagonal=False).density
        for sink, most in ((False, 1), (True, 3)):
            made = sp.build("xattention", stride=4, threshold=threshold, block=block, sink=sink).run(one)
            assert chosen <= made.density <= chosen + most * (block + 1) / 513 + 1e-9
