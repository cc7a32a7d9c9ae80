"""Score -> keep functions, means over key tiles, and the Jensen-Shannon distance, against a few lines of Python."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from sparseprefill.statistics.pooled import js_distance, key_tile_mean
from sparseprefill.statistics.select import top_mass

SCORES = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(
    scores=SCORES, share=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), least=st.integers(0, 14), most=st.integers(1, 14)
)
def test_top_mass_keeps_the_shortest_prefix_within_its_bounds(
    scores: list[int], share: float, least: int, most: int
) -> None:
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    prefixes = [n for n in range(len(scores) + 1) if sum(scores[i] for i in order[:n]) >= share * sum(scores)]
    count = len(scores) if share == 1.0 else prefixes[0]
    count = min(max(count, least), most)
    keep = top_mass(torch.tensor([scores], dtype=torch.float64), share, least, most)
    assert sorted(order[:count]) == keep[0].nonzero().flatten().tolist()


@given(
    kv_len=st.integers(1, 60),
    q_share=st.floats(0, 1),
    tile=st.integers(1, 20),
    starts=st.none() | st.lists(st.floats(0, 0.99), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
def test_key_tile_mean_is_over_the_keys_that_some_query_may_see(
    kv_len: int, q_share: float, tile: int, starts: list[float] | None, seed: int
) -> None:
    q_len = max(1, int(q_share * kv_len))
    offset = seed % (kv_len - q_len + 1)
    k = torch.randn(2, 1, kv_len, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    first = [0, 0] if starts is None else [int(start * kv_len) for start in starts]
    rows = None if starts is None else torch.tensor(first, dtype=torch.int32)
    call = sp.AttentionCall(k[:, :, :q_len], k, k, q_offset=offset, starts=rows)
    expected = torch.zeros(2, 1, -(-kv_len // tile), 3, dtype=torch.float64)
    for b in range(2):
        seen = k[b, 0, first[b] : offset + q_len]
        for c, part in enumerate(seen.split(tile) if len(seen) else ()):
            expected[b, 0, c] = part.mean(0)
    poisoned = k.clone()
    poisoned[:, :, offset + q_len :] = math.nan
    torch.testing.assert_close(expected, key_tile_mean(evolve(call, k=poisoned), tile))


def test_js_distance_is_symmetric_and_at_most_one() -> None:
    p, q = torch.rand(2, 50, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    torch.testing.assert_close(js_distance(p, q), js_distance(q, p))
    assert bool((js_distance(p, q) < 1).all())
    assert [0.0] * 50 == js_distance(p, p).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_js_distance_of_distributions_apart_is_one(dtype: torch.dtype) -> None:
    assert 1.0 == float(js_distance(torch.tensor([1.0, 0.0], dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)))
