"""The kernel of capability 9.0 on the pages of a cache, against float64 attention and against itself on a copy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve

from helpers.families import only
from kernels.caches import LAYOUTS, copied, in_fp8, paged, untouched
from kernels.device import BOUNDS, HOPPER
from kernels.test_hopper import HALVES, check, far, mixed
from sparseprefill import AttentionCall, Carry, Plan, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of capability 9.0")]
TRITON = TritonExecutor()
SAME = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
LENGTHS = [(1, 1, 1), (127, 127, 1), (128, 128, 4), (129, 129, 8), (257, 1021, 4), (1500, 1500, 2)]
PAGES = (16, 32, 128)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def make(dtype: torch.dtype, width: int, size: tuple[int, int, int], **fields: Any) -> AttentionCall:
    q_len, kv_len, group = size
    sizes: dict[str, Any] = {"batch": 1, "heads": group * 2, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
    q, k, v = tensors("random", head_dim=width, device="cuda", dtype=dtype, **sizes)
    return AttentionCall(q, k, v, **fields)


def check_pages(call: AttentionCall, plan: Plan) -> None:
    """Float64 attention's output, from the pages alone; and that of the same kernel for tensors, but for repairs."""
    check(call, plan, plan.mask.to_dense(), truth=copied(call))
    assert untouched(call)
    assert far(TRITON.execute(call, plan).out, TRITON.execute(copied(call), plan).out) <= SAME[call.q.dtype]


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


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied because it would be read often."""
    monkeypatch.setattr("sparseprefill.kernels.hopper.launch.COPY", 0)


def test_a_short_prompt_over_fp8_is_copied() -> None:
    call = in_fp8(make(torch.bfloat16, 128, (700, 1300, 4)), 16)
    mask = mixed(call, (128, 128))
    check(call, Plan(mask), mask.to_dense(), truth=wide(call))
    assert call.pages is not None
    assert call.pages.gathered == {"k", "v"}


def wide(call: AttentionCall) -> AttentionCall:
    """The call with keys and values of an fp8 cache as float32, which holds them exactly but for their scale."""
    assert call.pages is not None
    pages = evolve(call.pages, dtype=torch.float32)
    return copied(evolve(call, q=call.q.float(), k=pages, v=pages))


def check_fp8(call: AttentionCall, plan: Plan) -> None:
    """Float64 attention's output, and nothing is copied."""
    check(call, plan, plan.mask.to_dense(), truth=wide(call))
    assert untouched(call)


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize(("layout", "page"), [("LBNHC", 16), ("LBHNC", 128)])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_an_fp8_cache_is_read_in_place(
    fp8: torch.dtype, dtype: torch.dtype, width: int, page: int, layout: str
) -> None:
    for number, lengths in enumerate(LENGTHS):
        scales = ((2.0, 0.5), (0.37, 0.021))[number % 2]
        call = in_fp8(make(dtype, width, lengths), page, layout, fp8, scales)
        tile = ((128, 128), (128, 64), (256, 128))[number % 3]
        for mask in (SparseMask.full(call, tile), mixed(call, tile), mixed(call, tile, both=False)):
            check_fp8(call, Plan(mask))


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("page", PAGES)
def test_an_fp8_cache_without_scales(page: int) -> None:
    call = in_fp8(make(torch.bfloat16, 128, (700, 1300, 4)), page, scales=None)
    for mask in (SparseMask.full(call), mixed(call, (128, 128))):
        check_fp8(call, Plan(mask))


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("page", PAGES)
def test_offsets_lengths_and_sinks_over_fp8(page: int) -> None:
    lengths = torch.tensor([901], dtype=torch.int32, device="cuda")
    sinks = torch.linspace(-1, 3, 8, device="cuda")
    call = in_fp8(make(torch.bfloat16, 128, (500, 1021, 4), q_offset=420, lengths=lengths, sinks=sinks), page)
    for mask in (SparseMask.full(call, 128), mixed(call, (128, 128)), mixed(call, (128, 128), both=False)):
        check_fp8(call, Plan(mask))


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("scales", [(2.0, 0.5), (0.37, 0.021)], ids=str)
def test_states_over_fp8_are_resumed(scales: tuple[float, float], width: int) -> None:
    call = in_fp8(make(torch.bfloat16, width, (700, 1300, 4)), 16, scales=scales)
    first = SparseMask.from_tiles(call, mixed(call, (128, 128)).tile_map(), (128, 128))
    rest = SparseMask.from_tiles(call, ~first.tile_map(), (128, 128), diagonal=False)
    carry = Carry(TRITON.accumulate(call, Plan(first)), first)
    check(call, Plan(rest, carry), SparseMask.full(call).to_dense(), truth=wide(call))
    assert untouched(call)


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize(("fp8", "value"), [(FP8[0], math.nan), (FP8[1], math.nan), (FP8[1], math.inf)], ids=str)
def test_nan_and_infinity_of_fp8_reach_only_the_rows_that_see_them(fp8: torch.dtype, value: float) -> None:
    for at in ("k", "v"):
        plain = make(torch.bfloat16, 128, (900, 900, 2))
        getattr(plain, at)[:, :, 700] = value
        call = in_fp8(plain, 16, stored=fp8)
        for mask in (SparseMask.full(call), mixed(call, (128, 128)), mixed(call, (128, 128), both=False)):
            out = TRITON.execute(call, Plan(mask)).out
            assert torch.equal(~torch.isfinite(out).all(-1), mask.to_dense()[..., 700])
        assert untouched(call)


@pytest.mark.usefixtures("in_place")
def test_every_number_of_fp8_is_converted_exactly() -> None:
    """One key a row: its value comes out as it is."""
    for fp8 in FP8:
        every = torch.arange(256, dtype=torch.uint8, device="cuda").view(fp8)
        finite = every[every.float().isfinite()].float()
        for dtype in HALVES:
            call = make(dtype, 256, (256, 256, 1))
            call.v[:] = 0.0
            call.v[..., : finite.numel()] = finite.to(dtype)
            call = in_fp8(call, 16, stored=fp8, scales=(1.0, 1.0))
            found = TRITON.execute(call, Plan(SparseMask.full(call)))
            assert torch.equal(found.out[0, 0, 0, : finite.numel()].float(), finite)
            assert untouched(call)


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("kind", ["tiles", "stripes", "both", "wide", "full"])
def test_long_calls_over_fp8_match_those_of_tensors(kind: str) -> None:
    """Many items a program, long lists, a chunk behind a cached prefix."""
    plain = make(torch.bfloat16, 128, (4096, 16384, 4), q_offset=12288)
    call, g = in_fp8(plain, 16), plain.geometry
    tiles = SparseMask.from_tiles(call, torch.rand(1, 8, g.tile_rows(128), g.tile_columns(128), device="cuda") < 0.1)
    stripes = mixed(call, (128, 128), both=False, group=16, width=16 if kind == "wide" else 1)
    made = {"tiles": tiles, "stripes": stripes, "both": tiles | stripes, "wide": tiles | stripes}
    plan = Plan(made.get(kind, SparseMask.full(call)))
    flat = TRITON.execute(copied(call), plan)
    for _ in range(5):  # a race shows now and then
        found = TRITON.execute(call, plan)
        assert untouched(call)
        assert float((found.lse - flat.lse).abs().nan_to_num(0.0).amax()) <= 1e-4
        assert output_error(found.out, flat.out) <= SAME[torch.bfloat16]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", ["tiles", "stripes", "both", "wide", "full"])
def test_long_calls_match_those_of_tensors(kind: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many items a program, long lists; and the portable kernel on the same pages."""
    plain = make(torch.bfloat16, 128, (16384, 16384, 4))
    call, g = paged(plain, page), plain.geometry
    tiles = SparseMask.from_tiles(call, torch.rand(1, 8, g.tile_rows(128), g.tile_columns(128), device="cuda") < 0.1)
    stripes = mixed(call, (128, 128), both=False, group=16, width=16 if kind == "wide" else 1)
    made = {"tiles": tiles, "stripes": stripes, "both": tiles | stripes, "wide": tiles | stripes}
    plan = Plan(made.get(kind, SparseMask.full(call)))
    flat = TRITON.execute(plain, plan)
    for _ in range(3):  # a race shows now and then
        found = TRITON.execute(call, plan)
        assert float((found.lse - flat.lse).abs().nan_to_num(0.0).amax()) <= 1e-4
        assert output_error(found.out, flat.out) <= 1e-4
    only(monkeypatch)
    assert output_error(TRITON.execute(call, plan).out, flat.out) <= BOUNDS[torch.bfloat16]
    assert untouched(call)


def test_heads_of_a_part() -> None:
    call = paged(make(torch.bfloat16, 128, (700, 700, 4)), 16)
    assert call.pages is not None
    narrow = call.pages.narrow(slice(1, 2), 600)
    part = evolve(call, q=call.q[:, 4:, :600], k=narrow, v=narrow)
    check_pages(part, Plan(SparseMask.full(part)))
