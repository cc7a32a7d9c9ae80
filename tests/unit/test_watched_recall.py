"""Recall for hosts at work: the rows that are looked at, and what they kept, against `sp.recall` on the same rows."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import int32, make
from kernels.caches import paged
from sparseprefill.metrics import LAST, SPREAD, WatchedRecall, watched_recall
from sparseprefill.statistics.sampled import spread_rows
from sparseprefill.testing import calls

CALLS = calls(max_len=131, dtypes=(torch.float32, torch.float64))
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 0}


def check(call: sp.AttentionCall, result: sp.Result) -> WatchedRecall:
    """Each real row has what `sp.recall` says of it, and every other one nothing."""
    found = watched_recall(call, result)
    for b in range(call.q.shape[0]):
        expected = sp.recall(call, result, rows=found.rows[b])[b]
        real = found.real[b]
        torch.testing.assert_close(found.kept[b][:, real], expected[:, real], **CLOSE)
        assert bool(found.kept[b][:, ~real].isnan().all())
    return found


@given(call=CALLS, name=st.sampled_from(["streaming", "anchor-attention", "vertical-slash", "bfla"]))
def test_it_is_recall_on_the_same_rows(call: sp.AttentionCall, name: str) -> None:
    method = sp.default_registry().get(name)
    pipeline = method.pipeline(**method.small)
    if not pipeline.unsupported(call):
        check(call, pipeline.run(call))


@given(call=CALLS, count=st.integers(1, 40))
def test_rows_are_the_ends_of_equal_stretches_of_real_rows(call: sp.AttentionCall, count: int) -> None:
    rows, real = spread_rows(call, count)
    for b, there in enumerate(call.geometry.real_queries()):
        mine = there.nonzero()[:, 0].tolist()
        n = len(mine)
        ends = [mine[(i + 1) * n // count - 1] for i in range(count) if (i + 1) * n // count > i * n // count]
        assert ends == rows[b][real[b]].tolist()
        assert not n or mine[-1] == ends[-1]
    assert bool((rows >= 0).all() and (rows < call.q.shape[2]).all())


def test_rows_over_a_call_and_at_its_end() -> None:
    call = make(1700)
    found = check(call, sp.build("streaming", sink=4, window=64, block=16).run(call))
    assert (SPREAD, SPREAD + LAST) == (found.spread, found.rows.shape[1])
    assert [*range(99, 1700, 100), *range(1700 - LAST, 1700)] == found.rows[0].tolist()
    assert len({int(row) % 16 for row in found.rows[0, :SPREAD]}) > 2, "anywhere in query tiles"


def test_a_batch_row_of_padding_alone_has_no_rows() -> None:
    call = make(40, batch=3, starts=int32(0, 40, 11))
    rows, real = spread_rows(call, 5)
    assert [5, 0, 5] == real.sum(-1).tolist()
    assert int(rows.max()) < 40
    found = check(call, sp.build("streaming", sink=4, window=6, block=4).run(call))
    assert bool(found.kept[1].isnan().all())


@pytest.mark.parametrize("name", ["streaming", "anchor-attention"])
def test_of_what_was_executed(name: str) -> None:
    """Tail, carry and parts included; the tail's rows kept everything."""
    call = make(300, heads=4, kv_heads=2)
    method = sp.default_registry().get(name)
    pipeline = method.pipeline(**method.small)
    bare, tailed = check(call, pipeline.run(call)), check(call, pipeline.with_tail(20).run(call))
    assert bool((bare.kept[..., SPREAD:] < 0.99).any())
    torch.testing.assert_close(tailed.kept[..., SPREAD:], torch.ones(1, 4, LAST), **CLOSE)
    parts = evolve(pipeline, workspace=1).run(call)
    assert parts.parts is not None
    assert parts.parts.count > 1
    torch.testing.assert_close(bare.kept, check(call, parts).kept, **CLOSE)


def test_keys_in_pages() -> None:
    call = make(90, 131, heads=4, kv_heads=2)
    there = paged(call, 16)
    pipeline = sp.build("streaming", sink=4, window=16, block=8)
    expected = watched_recall(call, pipeline.run(call))
    torch.testing.assert_close(expected.kept, watched_recall(there, pipeline.run(there)).kept, **CLOSE)


@pytest.mark.parametrize("batch", [{}, {"batch": 3, "starts": int32(0, 77, 300)}], ids=["plain", "padded"])
def test_a_floors_rows_are_not_taken_for_others(batch: dict[str, Any]) -> None:
    """They keep the target, as the floor saw to it; what counts is how rows fare that it has not looked at."""
    call = make(300, heads=4, kv_heads=2, **batch)
    pipeline = sp.build(
        "streaming", sink=4, window=8, block=8, recall=sp.RecallFloor(target=0.9, rows=4, speaks_for="tile")
    )
    result = pipeline.run(call)
    sample, found = result.plan.notes["recall_sample"], check(call, result)
    assert bool((sample.after[sample.real[:, None].expand_as(sample.after)] >= 0.9 - 1e-5).all())
    assert SPREAD == found.spread
    assert bool((found.kept[0] < 0.9).any())
    parts = evolve(pipeline, workspace=1).run(call)
    assert parts.parts is not None
    assert parts.parts.count > 1
    assert SPREAD == check(call, parts).spread
