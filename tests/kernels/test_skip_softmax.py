"""Skip-softmax in kernels: the oracle's votes, block by block, for any call and mask; and long calls of 16 bits.

The Hopper kernel's votes are by warpgroups of 64 rows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.skipping import check_against_oracle, plan_of
from kernels.caches import paged
from kernels.device import BOUNDS, CUDA, DEVICE
from kernels.each import HALVES, TRITON, each, far, portable_unless_named
from kernels.requests import mask_of
from sparseprefill import AttentionCall, Carry, Plan, ReferenceExecutor, Result, SparseMask, output_error
from sparseprefill.kernels.family.record import Family
from sparseprefill.kernels.hopper.record import HOPPER
from sparseprefill.testing import attention, calls, masks, tensors
from sparseprefill.testing.votes import computed

__all__ = ["portable_unless_named"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REFERENCE = ReferenceExecutor()
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


TYPE = {"portable": torch.float16, "hopper": torch.bfloat16}
TILES = {"portable": [(32, 16)], "hopper": [(128, 128), (128, 64), (256, 128)]}
LENGTHS = {
    "portable": [(1, 1, 1), (20, 61, 2)],
    "hopper": [(1, 1, 1), (127, 300, 1), (129, 129, 2), (257, 1021, 1), (900, 900, 2)],
}
BELOW_16 = math.exp(-4.0)


def uneven(call: AttentionCall, share: int = 4, run: int = 128) -> AttentionCall:
    """Of the keys, one run in `share` has logits of any weight; those of the others lie far below a row's best, so that
    no vote is near."""
    strong = (torch.arange(call.kv_len, device=DEVICE) // run) % share == 0
    k = torch.where(strong[:, None], call.k, call.k * 0.02)
    return evolve(call, q=call.q * 5, k=k, v=call.v)


def made(kernel: Family, dtype: torch.dtype, dim: int, size: tuple[int, int, int], padded: bool) -> AttentionCall:
    q_len, kv_len, group = size
    shape: dict[str, Any] = {"batch": 2, "heads": 2 * group, "kv_heads": 2, "head_dim": dim}
    q, k, v = tensors("random", q_len=q_len, kv_len=kv_len, device=DEVICE, dtype=dtype, **shape)
    more: dict[str, Any] = {}
    if padded:
        starts = torch.tensor([0, kv_len // 4], dtype=torch.int32, device=DEVICE)
        reals = torch.tensor([kv_len, kv_len - kv_len // 4 - kv_len // 8], dtype=torch.int32, device=DEVICE)
        more = {"starts": starts, "lengths": reals, "sinks": torch.linspace(-1, 3, 2 * group, device=DEVICE)}
    return uneven(AttentionCall(q, k, v, **more), run=TILES[kernel.name][0][1])


def mixed(call: AttentionCall, tile: tuple[int, int], kind: str = "both", group: int = 2) -> SparseMask:
    """See `mask_of`."""
    return mask_of(call, kind, tile, group, call.kv_len)


def below(call: AttentionCall, mask: SparseMask, least: float = BELOW_16, carry: Carry | None = None) -> Plan:
    """A plan with one threshold of a row's largest weight, whatever the prompt's length."""
    return Plan(mask, carry, skip_below=torch.full((call.q.shape[0],), least, device=DEVICE))


def check(kernel: Family, call: AttentionCall, plan: Plan, truth: AttentionCall | None = None) -> Result:
    """The kernel's own count, and output and LSE, are those of the pairs that its rows voted for."""
    result = TRITON.execute(call, plan)
    assert [one.name for one in result.kernels] == [kernel.name]
    assert result.skipped is not None
    whole = call if truth is None else truth
    keep = computed(whole, result)
    assert (result.mask.to_dense() & ~keep).sum((2, 3)).tolist() == result.skipped.pairs.tolist()
    out, lse = attention(whole, keep)
    assert far(result.out, out) <= BOUNDS[call.q.dtype]
    assert torch.equal(lse == -torch.inf, result.lse == -torch.inf)
    assert bool(((result.lse - lse)[lse != -torch.inf].abs() <= 1e-3).all())
    return result


@each(dim={"portable": (64,), "hopper": (64, 128, 256)}, tile=TILES, padded=[False, True])
def test_votes_match_float64(kernel: Family, dim: int, tile: tuple[int, int], padded: bool) -> None:
    for number, lengths in enumerate(LENGTHS[kernel.name]):
        dtype = HALVES[number % 2] if kernel is HOPPER else TYPE[kernel.name]
        call = made(kernel, dtype, dim, lengths, padded)
        for mask in (SparseMask.full(call, tile), *(mixed(call, tile, kind) for kind in ("both", "stripes", "wide"))):
            check(kernel, call, below(call, mask))


@each()
def test_resumed_votes_and_those_of_pages_match_float64(kernel: Family) -> None:
    """`accumulate` votes as `execute` does."""
    tile, dim = TILES[kernel.name][0], {"portable": 64, "hopper": 128}[kernel.name]
    size = {"portable": (40, 61, 2), "hopper": (700, 900, 2)}[kernel.name]
    call = made(kernel, TYPE[kernel.name], dim, size, padded=True)
    first = SparseMask.from_tiles(call, mixed(call, tile).tile_map(), tile)
    rest = SparseMask.from_tiles(call, ~first.tile_map(), tile, diagonal=False)
    carry = Carry(TRITON.accumulate(call, Plan(first)), first)
    result = check(kernel, call, below(call, rest, carry=carry))
    out, lse = TRITON.accumulate(call, below(call, rest, carry=carry)).finish(call.sinks)
    assert output_error(out, result.out) <= 5e-3
    assert torch.allclose(result.lse, lse, atol=1e-4)
    whole = made(kernel, TYPE[kernel.name], dim, (size[1], size[1], 2), padded=False)
    plain = evolve(whole, q=whole.q[:1], k=whole.k[:1], v=whole.v[:1])
    for page in (16, 128):
        # NaN behind the last key would have its block repaired by the portable kernel, which votes in other groups.
        of_pages = paged(plain, page, garbage=3.0)
        for mask in (SparseMask.full(of_pages, tile), mixed(of_pages, tile)):
            check(kernel, of_pages, below(of_pages, mask), truth=plain)


def long_half(length: int = 16384, share: int = 4) -> AttentionCall:
    shape: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": length, "kv_len": length, "head_dim": 128}
    return uneven(AttentionCall(*tensors("random", device=DEVICE, dtype=torch.bfloat16, **shape)), share)


@each(HOPPER, share=[1, 2, 4, 64])
def test_votes_do_not_depend_on_when_values_are_fetched(
    kernel: Family, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many items a program, and every share of steps left out: the same bits, with values on demand or not."""
    from sparseprefill.kernels.hopper import launch as hopper

    call = long_half(share=share)
    plan = below(call, SparseMask.full(call))
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


@each(HOPPER)
def test_stripes_and_tiles_together_in_long_calls(kernel: Family) -> None:
    call = long_half(8192)
    mask = mixed(call, (128, 128), group=16)
    first = TRITON.execute(call, below(call, mask))
    assert first.skipped is not None
    assert 0 < first.skipped_share < 1
    for _ in range(4):
        again = TRITON.execute(call, below(call, mask))
        assert torch.equal(first.out, again.out)


@each(HOPPER)
def test_thresholds_that_nothing_falls_below_leave_nothing_out(kernel: Family) -> None:
    call = long_half(3000)
    mask = mixed(call, (128, 128))
    plain = TRITON.execute(call, Plan(mask))
    for least in (0.0, 1e-30, 1.0):  # 1 is refused on CPUs, and counts as 0 where nobody can look
        result = TRITON.execute(call, below(call, mask, least))
        assert result.skipped is not None
        assert int(result.skipped.pairs.sum()) == 0
        assert output_error(result.out, plain.out) <= 5e-3
        assert torch.allclose(result.lse, plain.lse, atol=1e-3)


@each(HOPPER)
def test_a_block_that_is_repaired_votes_as_the_portable_kernel_does(kernel: Family) -> None:
    """A NaN of V behind the rows of a block, and one that they see."""
    call = long_half(1000)
    call.v[:, :, 700] = torch.nan
    result = TRITON.execute(call, below(call, SparseMask.full(call)))
    assert bool(torch.isfinite(result.out[:, :, :700]).all())
    assert bool(torch.isfinite(result.lse).all())
    assert result.skipped is not None
    assert 0 < result.skipped_share < 1
