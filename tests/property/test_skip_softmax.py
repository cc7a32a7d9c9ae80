"""Skip-softmax by the executors of CPUs: the same as loops over floats, for any call and mask."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.skipping import check_against_oracle, plan_of
from sparseprefill.testing import attention, calls, masks
from sparseprefill.testing.truth import difference
from sparseprefill.testing.votes import computed

REFERENCE = sp.ReferenceExecutor()
EACH = pytest.mark.parametrize("executor", [REFERENCE, sp.CpuExecutor()], ids=lambda one: type(one).__name__)
CALLS = calls(max_len=60, max_heads=2, max_batch=2, head_dims=(4,), dtypes=(torch.float64, torch.float32))
BELOW = st.sampled_from([0.5, 4.0, 15.0, 40.0])
SMALL = settings(max_examples=25)


@EACH
@SMALL
@given(call=CALLS, data=st.data(), below=BELOW, sharp=st.sampled_from([1.0, 6.0]))
def test_executors_are_the_oracle(
    executor: sp.SparseExecutor, call: sp.AttentionCall, data: st.DataObject, below: float, sharp: float
) -> None:
    call = evolve(call, q=call.q * sharp)
    mask = data.draw(masks(call, tiles=(2, 8, 16), diagonal=data.draw(st.booleans())))
    result = executor.execute(call, plan_of(call, mask, below))
    answer = check_against_oracle(call, result, below)
    # and what the contracts take for computed is what was
    keep = computed(call, result)
    assert answer.skipped == (mask.to_dense() & ~keep).sum((2, 3)).tolist()
    allowed = call.geometry.visible_counts().sum() * call.q.shape[1]
    if allowed:
        assert result.density == pytest.approx(float(keep.sum() / allowed))
    out, lse = attention(call, keep)
    assert difference(out, result.out, call.q.dtype) is None
    assert difference(lse, result.lse, call.q.dtype) is None


def test_the_oracle_skips_in_these_tests() -> None:
    """Else they would say nothing."""
    shares = [_one(below).skipped_share for below in (0.0, 0.5, 4.0, 40.0)]
    assert shares[0] == 0
    assert sorted(shares) == shares
    assert 0.05 < shares[-1] < 1


def _one(below: float) -> sp.Result:
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 1, 60, 4) for _ in range(3))
    call = sp.AttentionCall(q * 6, k, v)
    return REFERENCE.execute(call, plan_of(call, sp.SparseMask.full(call, 8), below))


@EACH
@SMALL
@given(seed=st.integers(0, 1 << 16), below=BELOW, tile=st.sampled_from([(5, 2), (5, 3), (3, 2), (7, 4)]))
def test_a_key_tile_may_end_where_a_query_tile_begins(
    executor: sp.SparseExecutor, seed: int, below: float, tile: tuple[int, int]
) -> None:
    """Such a tile has no key behind the first row: it comes in the order of those before, not of those that lead."""
    made = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, 40, 4, generator=made) for _ in range(3))
    call = sp.AttentionCall(q * 6, k, v)
    mask = sp.SparseMask.full(call, tile)
    check_against_oracle(call, executor.execute(call, plan_of(call, mask, below)), below)


@EACH
@SMALL
@given(call=CALLS, data=st.data())
def test_a_threshold_of_zero_leaves_nothing_out(
    executor: sp.SparseExecutor, call: sp.AttentionCall, data: st.DataObject
) -> None:
    mask = data.draw(masks(call, tiles=(8, 16)))
    result = executor.execute(call, plan_of(call, mask, 0.0))
    plain = REFERENCE.execute(call, sp.Plan(mask))
    assert result.skipped is not None
    assert int(result.skipped.pairs.sum()) == 0
    assert difference(plain.out, result.out, call.q.dtype) is None
    assert difference(plain.lse, result.lse, call.q.dtype) is None


@EACH
@SMALL
@given(call=CALLS, data=st.data(), below=BELOW)
def test_the_running_maximum_begins_with_the_carry(
    executor: sp.SparseExecutor, call: sp.AttentionCall, data: st.DataObject, below: float
) -> None:
    """What is far below a carry's maximum is left out at once."""
    call = evolve(call, q=call.q * 4)
    full = sp.SparseMask.full(call, 8)
    keep = data.draw(masks(call, tiles=(8,), kinds=("tiles",))).tile_map()
    first = sp.SparseMask.from_tiles(call, keep, 8)
    carry = sp.Carry(REFERENCE.accumulate(call, sp.Plan(first)), first)
    plan = evolve(plan_of(call, full - first, below), carry=carry)
    result = executor.execute(call, plan)
    again, same = executor.accumulate(call, plan).finish(call.sinks)
    assert difference(result.out, again, torch.float32) is None
    assert difference(result.lse, same, torch.float32) is None
    out, lse = attention(call, computed(call, result))
    assert difference(out, result.out, torch.float32) is None
    assert difference(lse, result.lse, torch.float32) is None
    assert result.skipped is not None
    assert int(result.skipped.pairs.sum()) == int((result.mask.to_dense() & ~computed(call, result)).sum())


def test_the_largest_threshold_is_one_that_no_prompt_reaches() -> None:
    assert sp.SkipSoftmax(1e12).below == 1e12
