"""Skip-softmax in the portable kernel: the oracle's votes, block by block, for any call and mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.skipping import check_against_oracle, plan_of
from kernels.device import CUDA, DEVICE
from sparseprefill import AttentionCall, Carry, Plan, ReferenceExecutor, SparseMask
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import attention, calls, masks, tensors
from sparseprefill.testing.votes import computed

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRITON, REFERENCE = TritonExecutor(), ReferenceExecutor()
FEW = settings(max_examples=40 if CUDA else 8)
DTYPE = torch.float32
SHARP = 1e-4
"""Logits reach hundreds here: at 100 one step of float32 is 8e-6, and a sum of products is several of them away."""
BELOW = st.sampled_from([2.0, 10.0, 25.0])
some_calls = calls(
    max_batch=2, max_heads=2, head_dims=(64,), max_len=150 if CUDA else 70, dtypes=(DTYPE,), device=DEVICE
)  # fmt: skip


@FEW
@given(data=st.data(), call=some_calls, below=BELOW)
def test_equals_the_oracle(data: st.DataObject, call: AttentionCall, below: float) -> None:
    call = evolve(call, q=call.q * 3)
    mask = data.draw(masks(call, tiles=(16, 32)))
    result = TRITON.execute(call, plan_of(call, mask, below))
    check_against_oracle(call, result, below, bound=SHARP)


def long_call(length: int = 320, sharp: float = 3.0, seed: int = 0) -> AttentionCall:
    """Two heads of one KV head."""
    sizes: dict[str, Any] = {"heads": 2, "kv_heads": 1, "q_len": length, "kv_len": length, "head_dim": 64}
    q, k, v = tensors("random", batch=1, device=DEVICE, dtype=DTYPE, seed=seed, **sizes)
    return AttentionCall(q * sharp, k, v)


def test_the_share_grows_with_the_threshold_and_the_error_stays_below_its_mass() -> None:
    """What is left out has at most `threshold` of a row's largest weight a pair."""
    call = long_call()
    mask, length, shares = SparseMask.full(call, 16), call.kv_len, list[float]()
    dense, lse = attention(call)
    for below in (0.0, 2.0, 30.0, 250.0):
        result = TRITON.execute(call, plan_of(call, mask, below))
        assert result.skipped is not None
        shares.append(result.skipped_share)
        keep = computed(call, result)
        wanted, kept = attention(call, keep)
        assert torch.allclose(wanted.float(), result.out, atol=1e-4)
        assert torch.allclose(kept.float(), result.lse, atol=1e-4)
        lost = 1 - torch.exp(kept - lse)
        left = (mask.to_dense() & ~keep).sum(-1)
        threshold = below / length
        assert bool((lost <= threshold * left / (1 + threshold * left) + 1e-9).all())
        assert bool((((dense - wanted).norm(dim=-1) > 1e-9) <= (left > 0)).all())
    assert shares[0] == 0
    assert sorted(shares) == shares
    assert 0.05 < shares[-1] < 1


def test_thresholds_of_zero_leave_nothing_out() -> None:
    """The order of the tiles is another than without thresholds."""
    call = long_call(100)
    mask = SparseMask.full(call, 16)
    plain, zero = TRITON.execute(call, Plan(mask)), TRITON.execute(call, plan_of(call, mask, 0.0))
    assert plain.skipped is None
    assert torch.allclose(plain.out, zero.out, atol=1e-6)
    assert torch.allclose(plain.lse, zero.lse, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_of_v_reach_only_the_rows_that_compute_them(value: float) -> None:
    """Blocks are repaired with the same votes."""
    call = long_call(120, sharp=12.0)
    call.k[:, :, 48:64] = 0.0  # hardly worth a row's while
    call.v[:, :, 50] = value
    result = TRITON.execute(call, plan_of(call, SparseMask.full(call, 16), 60.0))
    keep = computed(call, result)
    assert torch.equal(keep[..., 50], ~torch.isfinite(result.out).all(-1))
    assert result.skipped is not None
    assert int((SparseMask.full(call, 16).to_dense() & ~keep).sum()) == int(result.skipped.pairs.sum())
    assert not bool(keep[..., 50:, 50].all())


@FEW
@given(data=st.data(), below=BELOW)
def test_a_carry_and_a_state(data: st.DataObject, below: float) -> None:
    """Votes begin with the carry's maximum; `accumulate` votes as `execute` does."""
    call = long_call(data.draw(st.integers(17, 70)), seed=data.draw(st.integers(0, 99)))
    full = SparseMask.full(call, 16)
    first = SparseMask.from_tiles(call, data.draw(masks(call, tiles=(16,), kinds=("tiles",))).tile_map(), 16)
    carry = Carry(REFERENCE.accumulate(call, Plan(first)), first)
    plan = evolve(plan_of(call, full - first, below), carry=carry)
    result = TRITON.execute(call, plan)
    out, lse = attention(call, computed(call, result))
    assert torch.allclose(out.float(), result.out, atol=1e-4)
    assert torch.allclose(lse.float(), result.lse, atol=1e-4)
    again, same = TRITON.accumulate(call, plan).finish()
    assert torch.allclose(result.out, again, atol=1e-5)
    assert torch.allclose(result.lse, same, atol=1e-5)


def test_the_repair_of_a_block_counts_it_once() -> None:
    call = long_call(64)
    call.v[:, :, 40] = torch.nan
    seen = TRITON.execute(call, plan_of(call, SparseMask.full(call, 16), 20.0))
    clean = evolve(call, v=call.v.nan_to_num(0.0))
    expected = TRITON.execute(clean, plan_of(clean, SparseMask.full(clean, 16), 20.0))
    assert seen.skipped is not None
    assert expected.skipped is not None
    assert expected.skipped.pairs.tolist() == seen.skipped.pairs.tolist()
