"""The kernel of capability 9.0 on the pages of a cache, against float64 attention and against itself on a copy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve

from kernels.caches import LAYOUTS, copied, in_fp8, paged, untouched
from kernels.device import BOUNDS
from kernels.test_hopper import HALVES, HOPPER, check, mixed
from sparseprefill import AttentionCall, Carry, Plan, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention import launch as launcher
from sparseprefill.testing import attention, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of capability 9.0")]
TRITON = TritonExecutor()
SAME = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
LENGTHS = [(1, 1, 1), (127, 127, 1), (128, 128, 4), (129, 129, 8), (257, 1021, 4), (1500, 1500, 2)]
PAGES = (16, 32, 128)


def make(dtype: torch.dtype, width: int, size: tuple[int, int, int], **fields: Any) -> AttentionCall:
    q_len, kv_len, group = size
    sizes: dict[str, Any] = {"batch": 1, "heads": group * 2, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
    q, k, v = tensors("random", head_dim=width, device="cuda", dtype=dtype, **sizes)
    return AttentionCall(q, k, v, **fields)


def check_pages(call: AttentionCall, plan: Plan) -> None:
    """Float64 attention's output, from the pages alone; and that of the same kernel for tensors, but for repairs."""
    check(call, plan, plan.mask.to_dense(), truth=copied(call))
    assert untouched(call)
    assert output_error(TRITON.execute(call, plan).out, TRITON.execute(copied(call), plan).out) <= SAME[call.q.dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masks_match_float64(dtype: torch.dtype, width: int, page: int, layout: str) -> None:
    for number, lengths in enumerate(LENGTHS):
        garbage = (math.nan, 3.0)[number % 2]  # behind the last key: what is not finite has blocks repaired
        call = paged(make(dtype, width, lengths), page, layout, number, garbage)
        tile = ((128, 128), (128, 64), (256, 128))[number % 3]
        for mask in (SparseMask.full(call, tile), mixed(call, tile), mixed(call, tile, both=False)):
            check_pages(call, Plan(mask))


@pytest.mark.parametrize("page", [64, 256, 512])
def test_other_pages(page: int) -> None:
    call = paged(make(torch.bfloat16, 128, (700, 1300, 4)), page)
    for mask in (SparseMask.full(call, (128, 64)), SparseMask.full(call, 128), mixed(call, (128, 128))):
        check_pages(call, Plan(mask))


@pytest.mark.parametrize("page", PAGES)
def test_offsets_lengths_and_sinks(page: int) -> None:
    lengths = torch.tensor([901], dtype=torch.int32, device="cuda")
    sinks = torch.linspace(-1, 3, 8, device="cuda")
    call = paged(make(torch.bfloat16, 128, (500, 1021, 4), q_offset=420, lengths=lengths, sinks=sinks), page)
    for mask in (SparseMask.full(call, 128), mixed(call, (128, 128)), mixed(call, (128, 128), both=False)):
        check(call, Plan(mask), mask.to_dense(), truth=copied(call))
    assert untouched(call)


@pytest.mark.parametrize("page", PAGES)
def test_states_are_resumed(page: int) -> None:
    call = paged(make(torch.bfloat16, 128, (700, 1300, 4)), page)
    first = SparseMask.from_tiles(call, mixed(call, (128, 128)).tile_map(), (128, 128))
    rest = SparseMask.from_tiles(call, ~first.tile_map(), (128, 128), diagonal=False)
    carry = Carry(TRITON.accumulate(call, Plan(first)), first)
    check(call, Plan(rest, carry), SparseMask.full(call).to_dense(), truth=copied(call))
    assert untouched(call)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_of_v_reach_only_the_rows_that_see_them(value: float, page: int) -> None:
    plain = make(torch.bfloat16, 128, (900, 900, 2))
    plain.v[:, :, 700] = value
    call = paged(plain, page)
    for mask in (SparseMask.full(call), mixed(call, (128, 128)), mixed(call, (128, 128), both=False)):
        out = TRITON.execute(call, Plan(mask)).out
        assert torch.equal(~torch.isfinite(out).all(-1), mask.to_dense()[..., 700])
    assert untouched(call)


@pytest.mark.parametrize("page", [16, 128])
def test_an_fp8_cache_is_copied_for_it(page: int) -> None:
    call = in_fp8(make(torch.bfloat16, 128, (700, 1300, 4)), page)
    mask = mixed(call, (128, 128))
    out = TRITON.execute(call, Plan(mask)).out
    assert call.pages is not None
    assert call.pages.gathered == {"k", "v"}
    assert output_error(out, attention(copied(call), mask.to_dense())[0]) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", ["tiles", "stripes", "both", "full"])
def test_long_calls_match_those_of_tensors(kind: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many items a program, long lists; and the portable kernel on the same pages."""
    plain = make(torch.bfloat16, 128, (16384, 16384, 4))
    call, g = paged(plain, page), plain.geometry
    tiles = SparseMask.from_tiles(call, torch.rand(1, 8, g.tile_rows(128), g.tile_columns(128), device="cuda") < 0.1)
    stripes = mixed(call, (128, 128), both=False, group=16)
    plan = Plan({"tiles": tiles, "stripes": stripes, "both": tiles | stripes, "full": SparseMask.full(call)}[kind])
    flat = TRITON.execute(plain, plan)
    for _ in range(3):  # a race shows now and then
        found = TRITON.execute(call, plan)
        assert float((found.lse - flat.lse).abs().nan_to_num(0.0).amax()) <= 1e-4
        assert output_error(found.out, flat.out) <= 1e-4
    monkeypatch.setattr(launcher, "hopper_of", lambda _: None)
    assert output_error(TRITON.execute(call, plan).out, flat.out) <= BOUNDS[torch.bfloat16]
    assert untouched(call)


def test_heads_of_a_part() -> None:
    call = paged(make(torch.bfloat16, 128, (700, 700, 4)), 16)
    assert call.pages is not None
    narrow = call.pages.narrow(slice(1, 2), 600)
    part = evolve(call, q=call.q[:, 4:, :600], k=narrow, v=narrow)
    check_pages(part, Plan(SparseMask.full(part)))
