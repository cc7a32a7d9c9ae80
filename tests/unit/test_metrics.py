"""Recall and output error against brute force."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparseprefill as sp
from helpers.build import int32, make, one_lookup
from sparseprefill import metrics
from sparseprefill.testing import allowed_pairs

PADDED = make(40, batch=2, starts=int32(0, 11), kind="sink", softcap=8.0, dtype=torch.float64)


def run(call: sp.AttentionCall) -> sp.Result:
    return sp.build("streaming", sink=4, window=6, block=4).run(call)


def brute_force(call: sp.AttentionCall, keep: torch.Tensor) -> torch.Tensor:
    """Attention mass of the kept pairs, from the whole attention matrix."""
    k = call.k.repeat_interleave(call.group, 1)
    logits = call.q @ k.transpose(-1, -2) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    weights = torch.softmax(logits.masked_fill(~allowed_pairs(call)[:, None], -torch.inf), -1)
    return (weights * keep).sum(-1)


@pytest.mark.parametrize("call", [PADDED, make(30, 45, window=20, dtype=torch.float64), make(17, dtype=torch.float64)])
def test_recall_is_the_attention_mass_kept(call: sp.AttentionCall) -> None:
    result = run(call)
    expected = brute_force(call, result.mask.to_dense())
    torch.testing.assert_close(sp.recall(call, result), expected, equal_nan=True)


def test_recall_is_nan_in_padding_rows_and_one_for_dense() -> None:
    recall = sp.recall(PADDED, sp.build("dense").run(PADDED))
    assert bool(torch.isnan(recall[1, :, :11]).all())
    torch.testing.assert_close(recall[1, :, 11:], torch.ones(2, 29, dtype=torch.float64))


@pytest.mark.parametrize(
    ("rows", "index"),
    [
        (None, list(range(40))),
        (1, [0]),
        (3, [0, 20, 39]),
        (99, list(range(40))),
        ([5, 0], [5, 0]),
        ((39,), [39]),
        (torch.tensor([7]), [7]),
    ],
)
def test_rows_pick_query_rows(rows: Any, index: list[int]) -> None:
    assert index == metrics.sample_rows(PADDED, rows).tolist()
    result = run(PADDED)
    expected = sp.recall(PADDED, result)[:, :, index]
    torch.testing.assert_close(sp.recall(PADDED, result, rows=rows), expected, equal_nan=True)


@pytest.mark.parametrize(("count", "below"), [(1, 0), (99, 0), (100, 1), (199, 1), (200, 2), (2176, 21)])
def test_the_lowest_rows_of_all_heads(count: int, below: int) -> None:
    kept = torch.randperm(count, generator=torch.Generator().manual_seed(1)).double() / count
    padded = torch.cat([kept, torch.full((count,), torch.nan)])
    for rows in (kept, padded, padded.view(1, 2, -1)):
        first, lowest = metrics.lowest_rows(rows)
        assert (below / count, 0.0) == (float(first), float(lowest))


def test_there_are_no_lowest_rows_among_none() -> None:
    for none in (torch.full((2, 3), torch.nan), torch.empty(1, 2, 0)):
        assert all(bool(one.isnan()) for one in metrics.lowest_rows(none))


def test_the_lowest_rows_are_not_read_on_the_host() -> None:
    """A device that has no values to read."""
    assert all(one.shape == () for one in metrics.lowest_rows(torch.empty(1, 4, 64, device="meta")))


def test_one_row_that_loses_everything_shows_if_it_is_sampled() -> None:
    """And in the lowest row alone: the mean by head hides it, and the percentile of two heads does not reach it."""
    every = metrics.sample_rows(make(1000), 64)
    for row, seen in ((int(every[20]), True), (int(every[20]) + 1, False)):
        call = one_lookup(1000, row, key=100)
        result = sp.build("streaming", sink=16, window=64, block=16).run(call)
        assert 0.001 > float(sp.recall(call, result, rows=[row])[0, 1, 0])
        kept = sp.recall(call, result, rows=64)
        first, lowest = map(float, metrics.lowest_rows(kept))
        assert pytest.approx((1.0, 0.0 if seen else 1.0), abs=1e-3) == (first, lowest)
        assert float(kept.mean(-1).min()) == pytest.approx(63 / 64 if seen else 1.0, abs=1e-3)


def test_chunks_of_keys_do_not_change_the_dense_lse() -> None:
    rows = torch.arange(40)
    whole = metrics.dense_lse(PADDED, rows)
    torch.testing.assert_close(metrics.dense_lse(PADDED, rows, chunk=7), whole)


def test_output_error_is_the_relative_norm() -> None:
    truth = torch.tensor([3.0, 4.0])
    assert 0.0 == sp.output_error(truth, truth)
    assert pytest.approx(0.1) == sp.output_error(torch.tensor([3.0, 4.5]), truth)
