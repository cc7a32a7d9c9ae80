"""Skip-softmax in the warp-specialised kernel: each warpgroup of 64 rows votes for itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve

from kernels.caches import paged
from kernels.device import BOUNDS, HOPPER
from kernels.test_hopper import HALVES, make, mixed
from sparseprefill import AttentionCall, Carry, Plan, Result, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.plan import Kernel
from sparseprefill.testing import attention, tensors
from sparseprefill.testing.votes import computed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of capability 9.0")]
TRITON = TritonExecutor()
BELOW = math.exp(-4.0)
LENGTHS = [(1, 1, 1), (127, 300, 1), (129, 129, 2), (257, 1021, 1), (900, 900, 2)]
FEATURES = ("plain", "padded")


def uneven(call: AttentionCall, share: int = 4) -> AttentionCall:
    """Of the keys, one run of 128 in `share` has logits of any weight; those of the others lie far below a row's best,
    so that no vote is near."""
    strong = (torch.arange(call.kv_len, device="cuda") // 128) % share == 0
    k = torch.where(strong[:, None], call.k, call.k * 0.02)
    return evolve(call, q=call.q * 5, k=k, v=call.v)


def plan_of(call: AttentionCall, mask: SparseMask, below: float = BELOW, carry: Carry | None = None) -> Plan:
    return Plan(mask, carry, skip_below=torch.full((call.q.shape[0],), below, device="cuda"))


def check(call: AttentionCall, plan: Plan, truth: AttentionCall | None = None) -> Result:
    """The kernel's own count, and output and LSE, are those of the pairs that its rows voted for."""
    result = TRITON.execute(call, plan)
    assert (Kernel("hopper"),) == result.kernels
    assert result.skipped is not None
    whole = call if truth is None else truth
    keep = computed(whole, result)
    assert (result.mask.to_dense() & ~keep).sum((2, 3)).tolist() == result.skipped.pairs.tolist()
    out, lse = attention(whole, keep)
    assert output_error(result.out, out) <= BOUNDS[call.q.dtype]
    assert torch.equal(lse == -torch.inf, result.lse == -torch.inf)
    assert float((result.lse - lse)[lse != -torch.inf].abs().amax()) <= 1e-3
    return result


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("tile", [(128, 128), (128, 64), (256, 128)], ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_votes_match_float64(width: int, tile: tuple[int, int], feature: str) -> None:
    for number, lengths in enumerate(LENGTHS):
        call = uneven(make("random", HALVES[number % 2], width, lengths, feature))
        striped = (mixed(call, tile), mixed(call, tile, both=False), mixed(call, tile, width=16))
        for mask in (SparseMask.full(call, tile), *striped):
            check(call, plan_of(call, mask))


def long_call(length: int = 16384, share: int = 4) -> AttentionCall:
    shape: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": length, "kv_len": length, "head_dim": 128}
    return uneven(AttentionCall(*tensors("random", device="cuda", dtype=torch.bfloat16, **shape)), share)


@pytest.mark.parametrize("share", [1, 2, 4, 64])
def test_votes_do_not_depend_on_when_values_are_fetched(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many items a program, and every share of steps left out: the same bits, with values on demand or not."""
    from sparseprefill.kernels.hopper import launch as hopper

    call = long_call(share=share)
    plan = plan_of(call, SparseMask.full(call))
    first = TRITON.execute(call, plan)
    for defer in (True, False, True, False):
        monkeypatch.setattr(hopper, "DEFER", defer)
        again = TRITON.execute(call, plan)
        assert torch.equal(first.out, again.out)
        assert torch.equal(first.lse, again.lse)
        assert first.skipped is not None
        assert again.skipped is not None
        assert torch.equal(first.skipped.pairs, again.skipped.pairs)
    assert (share == 1) == (first.skipped_share < 0.01)
    assert first.skipped_share < 1
    # What is left out weighs little: at most the threshold of the row's largest weight a key.
    dense = TRITON.execute(call, Plan(SparseMask.full(call)))
    assert float((first.lse - dense.lse).max()) <= 1e-3


def test_stripes_and_tiles_together_in_long_calls() -> None:
    call = long_call(8192)
    mask = mixed(call, (128, 128), group=16)
    first = TRITON.execute(call, plan_of(call, mask))
    assert first.skipped is not None
    assert 0 < first.skipped_share < 1
    for _ in range(4):
        again = TRITON.execute(call, plan_of(call, mask))
        assert torch.equal(first.out, again.out)


def test_thresholds_that_nothing_falls_below_leave_nothing_out() -> None:
    call = long_call(3000)
    mask = mixed(call, (128, 128))
    plain = TRITON.execute(call, Plan(mask))
    for below in (0.0, 1e-30, 1.0):  # 1 is refused on CPUs, and counts as 0 where nobody can look
        result = TRITON.execute(call, plan_of(call, mask, below))
        assert result.skipped is not None
        assert int(result.skipped.pairs.sum()) == 0
        assert output_error(result.out, plain.out) <= 5e-3
        assert torch.allclose(result.lse, plain.lse, atol=1e-3)


def test_a_carry_a_state_and_pages() -> None:
    call = uneven(make("random", torch.bfloat16, 128, (700, 900, 2), "padded"))
    keep = mixed(call, (128, 128)).tile_map()
    first = SparseMask.from_tiles(call, keep, (128, 128))
    rest = SparseMask.from_tiles(call, ~first.tile_map(), (128, 128), diagonal=False)
    carry = Carry(TRITON.accumulate(call, Plan(first)), first)
    result = check(call, plan_of(call, rest, carry=carry))
    out, lse = TRITON.accumulate(call, plan_of(call, rest, carry=carry)).finish(call.sinks)
    assert output_error(out, result.out) <= 5e-3
    assert torch.allclose(result.lse, lse, atol=1e-4)
    q, k, v = tensors("random", batch=1, heads=4, kv_heads=2, q_len=900, kv_len=900, head_dim=128, device="cuda",
                      dtype=torch.bfloat16)  # fmt: skip
    plain = uneven(AttentionCall(q, k, v))
    for page in (16, 128):
        # NaN behind the last key would have its block repaired by the portable kernel, which votes in other groups.
        call = paged(plain, page, garbage=3.0)
        for mask in (SparseMask.full(call), mixed(call, (128, 128))):
            check(call, plan_of(call, mask), truth=plain)


def test_a_block_that_is_repaired_votes_as_the_portable_kernel_does() -> None:
    """A NaN of V behind the rows of a block, and one that they see."""
    call = long_call(1000)
    call.v[:, :, 700] = torch.nan
    result = TRITON.execute(call, plan_of(call, SparseMask.full(call)))
    assert bool(torch.isfinite(result.out[:, :, :700]).all())
    assert bool(torch.isfinite(result.lse).all())
    assert result.skipped is not None
    assert 0 < result.skipped_share < 1
