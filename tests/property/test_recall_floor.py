"""Laws of RecallFloor: what it promises, whatever the call, the plan, the chunks and the parts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import make
from helpers.plans import plans, refined, whole
from sparseprefill.testing import allowed_pairs, attention, calls, tensors

DATA = st.data()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = (1, 2, 127, 128, 129, 17, 31, 97, 131)
CALLS = calls(max_len=131, max_heads=8, head_dims=(8, 16), max_batch=2, dtypes=DTYPES)
SIZES: st.SearchStrategy[int | tuple[int, int]] = st.sampled_from([16, 8, 64, (16, 8)])
TARGETS = st.sampled_from([0.95, 0.5, 0.99, 1.0]) | st.floats(0.0, 1.0)
SPEAKS = st.sampled_from(["neighbours", "stretch", "tile"])
ROWS = st.sampled_from([64, 1, 2, 3, 7])
CLOSE = 2e-5


def dense(call: sp.AttentionCall) -> torch.Tensor:
    """float64 ``[B, Hq, Nq, Nkv]``: attention over all keys, from the call's own fields; zeros in padding rows."""
    k = call.k.double().repeat_interleave(call.group, 1)
    logits = call.q.double() @ k.transpose(-1, -2) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    return logits.masked_fill(~allowed_pairs(call)[:, None], -torch.inf).softmax(-1).nan_to_num(nan=0.0)


def assert_reached(call: sp.AttentionCall, after: sp.Plan, target: float) -> None:
    """The sampled rows keep the target of true attention, and the notes say what they keep."""
    sample = after.notes["recall_sample"]
    kept = (dense(call) * whole(after)).sum(-1)
    index = sample.rows[:, None].expand(-1, kept.shape[1], -1)
    found, real = kept.gather(2, index), sample.real[:, None].expand_as(index)
    assert bool((found[real] >= target - CLOSE).all())
    torch.testing.assert_close(found[real], sample.after[real].double(), atol=CLOSE, rtol=0)


@given(data=DATA, call=CALLS, target=TARGETS, rows=ROWS, speaks_for=SPEAKS)
def test_sampled_rows_reach_the_target_whatever_the_plan(
    data: st.DataObject, call: sp.AttentionCall, target: float, rows: int, speaks_for: str
) -> None:
    tile = data.draw(SIZES)
    plan = data.draw(st.just(sp.Plan(sp.SparseMask.empty(call, tile))) | plans(call))
    after = refined(sp.RecallFloor(target=target, rows=rows, speaks_for=speaks_for), call, plan)
    assert not bool((whole(plan) & ~whole(after)).any())
    assert_reached(call, after, target)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_and_groups(length: int, group: int) -> None:
    for dtype, offset in ((torch.float32, 0), (torch.bfloat16, 29)):
        q, k, v = tensors(
            "stripes", batch=1, heads=8, kv_heads=8 // group, q_len=length, kv_len=length + 37, head_dim=16,
            q_offset=offset, seed=length, dtype=dtype,
        )  # fmt: skip
        call = sp.AttentionCall(q, k, v, q_offset=offset)
        pipeline = evolve(sp.build("streaming", sink=16, window=16, block=16), refiners=(sp.RecallFloor(),))
        after = pipeline.plan(call, sp.Memory())
        assert_reached(call, after, 0.95)
        out, lse = attention(call, after.mask.to_dense())
        result = pipeline.run(call)
        close = 3e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(out, result.out.double(), atol=close, rtol=close)
        torch.testing.assert_close(lse, result.lse.double(), atol=close, rtol=close)


@given(data=DATA, call=CALLS, target=TARGETS, rows=ROWS, speaks_for=SPEAKS)
def test_a_full_mask_stays(
    data: st.DataObject, call: sp.AttentionCall, target: float, rows: int, speaks_for: str
) -> None:
    plan = sp.Plan(sp.SparseMask.full(call, data.draw(SIZES)))
    after = refined(sp.RecallFloor(target=target, rows=rows, speaks_for=speaks_for), call, plan)
    assert torch.equal(whole(plan), whole(after))
    assert torch.equal(plan.mask.pairs(), after.mask.pairs())
    assert not after.notes["recall_dense"].any()
    mean = after.notes["recall_after"]
    real = after.notes["recall_sample"].real.any(-1)[:, None].expand_as(mean)
    torch.testing.assert_close(torch.ones_like(mean[real]), mean[real], atol=CLOSE, rtol=0)


@given(data=DATA, call=CALLS, targets=st.lists(TARGETS, min_size=2, max_size=4), rows=ROWS, speaks_for=SPEAKS)
def test_more_is_kept_for_a_higher_target(
    data: st.DataObject, call: sp.AttentionCall, targets: list[float], rows: int, speaks_for: str
) -> None:
    plan = data.draw(plans(call))
    floors = [sp.RecallFloor(target=x, rows=rows, speaks_for=speaks_for) for x in sorted(targets)]
    found = [refined(floor, call, plan) for floor in floors]
    for less, more in pairwise(found):
        assert not bool((whole(less) & ~whole(more)).any())
        assert bool((less.notes["recall_sample"].after <= more.notes["recall_sample"].after + CLOSE).all())


@given(data=DATA, call=CALLS, target=TARGETS, rows=ROWS)
def test_density_is_never_above_dense(data: st.DataObject, call: sp.AttentionCall, target: float, rows: int) -> None:
    plan = data.draw(plans(call))
    after = refined(sp.RecallFloor(target=target, rows=rows), call, plan)
    counted = sum(mask.pairs() for mask in after.computed())
    full = sp.SparseMask.full(call).pairs()
    assert isinstance(counted, torch.Tensor)
    assert bool((counted <= full).all())
    assert torch.equal(whole(after).sum((2, 3)), counted)


@given(
    data=DATA,
    length=st.integers(40, 150),
    rows=st.sampled_from([1, 2, 64]),
    span=st.sampled_from([16, 32, 48]),
    speaks_for=SPEAKS,
)
def test_chunks_at_multiples_of_a_span_change_nothing(
    data: st.DataObject, length: int, rows: int, span: int, speaks_for: str
) -> None:
    call = make(length, heads=4, kv_heads=2, seed=length, dtype=torch.float64)
    floor = sp.RecallFloor(target=0.8, rows=rows, span=span, speaks_for=speaks_for)
    pipeline = evolve(sp.build("streaming", sink=16, window=16, block=16), refiners=(floor,))
    assert pipeline.grain is not None
    cuts = (
        data.draw(st.sets(st.integers(1, (length - 1) // pipeline.grain), max_size=3))
        if length > pipeline.grain
        else ()
    )
    ends = sorted({0, length, *(cut * pipeline.grain for cut in cuts)})
    expected = pipeline.run(call).mask.to_dense()
    for first, end in pairwise(ends):
        chunk = sp.AttentionCall(call.q[:, :, first:end], call.k[:, :, :end], call.v[:, :, :end], q_offset=first)
        assert torch.equal(expected[:, :, first:end, :end], pipeline.run(chunk).mask.to_dense())


@given(call=calls(max_len=131, max_heads=4, head_dims=(8,), max_batch=2, dtypes=(torch.float64,)), rows=ROWS)
def test_a_padded_row_is_refined_as_it_would_be_alone(call: sp.AttentionCall, rows: int) -> None:
    floor = sp.RecallFloor(target=0.8, rows=rows)
    together = floor.refine(call, sp.Plan(sp.SparseMask.empty(call, 16)), sp.Memory()).mask.to_dense()
    g = call.geometry
    for b in range(g.batch):
        start = 0 if call.starts is None else int(call.starts[b])
        keys = slice(start, start + (g.kv_len if call.lengths is None else int(call.lengths[b])))
        queries = slice(max(start - g.q_offset, 0), min(keys.stop - g.q_offset, g.q_len))
        if queries.start >= queries.stop:
            continue
        fields: dict[str, Any] = {"q_offset": max(g.q_offset - start, 0), "window": call.window, "scale": call.scale}
        one = slice(b, b + 1)
        alone = sp.AttentionCall(
            call.q[one, :, queries], call.k[one, :, keys], call.v[one, :, keys], softcap=call.softcap, **fields
        )
        expected = floor.refine(alone, sp.Plan(sp.SparseMask.empty(alone, 16)), sp.Memory()).mask.to_dense()
        assert torch.equal(expected[0], together[b, :, queries, keys])


@pytest.mark.parametrize("floor", [sp.RecallFloor(rows=5), sp.RecallFloor(rows=4, span=2048)])
def test_parts_are_the_whole(floor: sp.RecallFloor) -> None:
    call = make(4200, heads=4, kv_heads=2, dtype=torch.float64)
    one = sp.build("streaming", sink=64, window=128, block=64)
    assert isinstance(one, sp.Pipeline)
    pipeline = evolve(one, refiners=(floor,))
    expected = pipeline.run(call)
    found = evolve(pipeline, workspace=1 << 16).run(call)
    assert found.parts is not None
    assert (4 if floor.span is None else 12) == found.parts.count
    assert torch.equal(expected.mask.pairs(), found.parts.pairs)
    torch.testing.assert_close(expected.out, found.out)
