"""Attention kernels on the pages of a cache, against float64 attention on a copy: nothing is copied for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.caches import LAYOUTS, copied, in_fp8, paged, untouched
from kernels.device import BOUNDS, CUDA, DEVICE, DTYPES
from kernels.each import HALVES, TRITON, each, far, portable_unless_named
from kernels.each import check as check_call
from kernels.requests import long_mask, mask_of
from sparseprefill import AttentionCall, Carry, Pipeline, Plan, ReferenceExecutor, SparseMask, build, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.family.record import Family
from sparseprefill.kernels.hopper.record import HOPPER
from sparseprefill.testing import calls, masks, tensors

__all__ = ["portable_unless_named"]
# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REFERENCE = ReferenceExecutor()
SAME = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
LENGTHS = {
    "portable": [(1, 1, 2), (127, 127, 2), (20, 128, 2), (129, 129, 2), (33, 131, 2), (7, 211, 2)],
    "hopper": [(1, 1, 1), (127, 127, 1), (128, 128, 4), (129, 129, 8), (257, 1021, 4), (1500, 1500, 2)],
}
LONG = {"portable": (65, 131, 2), "hopper": (700, 1300, 4)}
TYPES = {"portable": DTYPES, "hopper": HALVES}
DIMS = {"portable": (64,), "hopper": (64, 128, 256)}
ANY_PAGE = (1, 16, 32, 48, 64, 128)
PAGES = {"portable": ANY_PAGE, "hopper": (16, 32, 128)}
TILES = {"portable": [(32, 16)], "hopper": [(128, 128), (128, 64), (256, 128)]}
KINDS = {"portable": ["full", "both", "tiles", "stripes", "wide"], "hopper": ["full", "both", "stripes"]}
FEW = ("full", "both", "stripes") if CUDA else ("full", "both")
FP8 = {"portable": (torch.float8_e4m3fn,), "hopper": (torch.float8_e4m3fn, torch.float8_e5m2)}
"""The interpreter gets the smallest numbers of e5m2 wrong."""
FEATURES: dict[str, list[dict[str, Any]]] = {
    "portable": [
        {"q_offset": 30},
        {"window": 40},
        {"softcap": 8.0, "scale": 0.3},
        {"starts": [17]},
        {"lengths": [90]},
        {"sinks": (-1.0, 3.0), "q_offset": 0},
    ],
    "hopper": [{"q_offset": 420, "lengths": [901], "sinks": (-1.0, 3.0)}],
}
TYPE = {"portable": torch.float16, "hopper": torch.bfloat16}
DIM = {"portable": 64, "hopper": 128}


def make(dtype: torch.dtype, dim: int, size: tuple[int, int, int], **fields: Any) -> AttentionCall:
    q_len, kv_len, group = size
    sizes: dict[str, Any] = {"batch": 1, "heads": group * 2, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
    q, k, v = tensors("random", head_dim=dim, device=DEVICE, dtype=dtype, seed=kv_len, **sizes)
    return AttentionCall(q, k, v, **fields)


def featured(kernel: Family, fields: dict[str, Any]) -> AttentionCall:
    """A call of the kernel's type and size; starts and lengths become tensors, and two sinks one for each head."""
    made = dict(fields)
    for name in {"starts", "lengths"} & fields.keys():
        made[name] = torch.tensor(fields[name], dtype=torch.int32, device=DEVICE)
    size = {"portable": (50, 131, 2), "hopper": (500, 1021, 4)}[kernel.name]
    if "sinks" in fields:
        first, last = fields["sinks"]
        made["sinks"] = torch.linspace(first, last, 2 * size[2], device=DEVICE)
    return make(TYPE[kernel.name], DIM[kernel.name], size, **made)


def some(call: AttentionCall, kind: str, kernel: Family, turn: int = 0) -> SparseMask:
    """See `mask_of`; tiles by turns."""
    tiles = TILES[kernel.name]
    return mask_of(call, kind, tiles[turn % len(tiles)], seed=call.kv_len)


def check(kernel: Family, call: AttentionCall, plan: Plan) -> None:
    """Float64 attention's output, from the pages alone; and that of the same kernel for tensors, but for repairs."""
    check_call(kernel, call, plan, plan.mask.to_dense(), truth=copied(call))
    assert untouched(call)
    if CUDA:
        assert far(TRITON.execute(call, plan).out, TRITON.execute(copied(call), plan).out) <= SAME[call.q.dtype]


@each(dtype=TYPES, dim=DIMS, page=PAGES, layout=sorted(LAYOUTS))
def test_pages_of_any_size_and_layout(kernel: Family, dtype: torch.dtype, dim: int, page: int, layout: str) -> None:
    """In the interpreter each takes a third of the lengths and one kind of mask by turns."""
    turn = ANY_PAGE.index(page) + sorted(LAYOUTS).index(layout) + TYPES[kernel.name].index(dtype)
    for number, lengths in enumerate(LENGTHS[kernel.name]):
        if not CUDA and number % 3 != turn % 3:
            continue
        garbage = (math.nan, 3.0)[number % 2]  # behind the last key: what is not finite has blocks repaired
        call = paged(make(dtype, dim, lengths), page, layout, number, garbage)
        kinds = KINDS[kernel.name]
        for kind in kinds if CUDA else (kinds[number % len(kinds)],):
            check(kernel, call, Plan(some(call, kind, kernel, number)))


@each(HOPPER, page=[64, 256, 512])
def test_other_pages(kernel: Family, page: int) -> None:
    call = paged(make(torch.bfloat16, 128, (700, 1300, 4)), page)
    for mask in (SparseMask.full(call, (128, 64)), SparseMask.full(call, 128), some(call, "both", kernel)):
        check(kernel, call, Plan(mask))


@each(PORTABLE, dim=[64, 80, 128, 256] if CUDA else [80], kind=KINDS)
def test_every_kind_of_mask(kernel: Family, dim: int, kind: str) -> None:
    call = paged(make(torch.float16, dim, (61, 137, 2)), 16)
    check(kernel, call, Plan(some(call, kind, kernel)))


@each(fields=FEATURES, page={"portable": [32], "hopper": [16, 32, 128]})
def test_every_feature_of_a_call(kernel: Family, fields: dict[str, Any], page: int) -> None:
    call = paged(featured(kernel, fields), page, "LBHNC")
    for kind in FEW:
        check(kernel, call, Plan(some(call, kind, kernel)))


def check_probe(call: AttentionCall, kind: str, probe: torch.Tensor) -> None:
    """The mass of probed tiles, as the reference has it on a copy."""
    plan = Plan(some(call, kind, PORTABLE), probe=probe)
    expected, actual = REFERENCE.execute(copied(call), plan), TRITON.execute(call, plan)
    assert untouched(call)
    assert expected.probe is not None
    assert actual.probe is not None
    assert torch.allclose(expected.probe, actual.probe, atol=2e-3)


def test_the_mass_of_probed_tiles() -> None:
    size, some_heads = (70, 129, 2), torch.tensor([[True, False, True, True]], device=DEVICE)
    check_probe(paged(make(torch.float16, 64, size), 16), "both", some_heads)
    for kind in ("full", "both"):
        check_probe(in_fp8(make(torch.float16, 64, size), 16), kind, torch.ones_like(some_heads))


@each(page={"portable": [32], "hopper": PAGES["hopper"]}, layout=sorted(LAYOUTS))
def test_states_are_resumed(kernel: Family, page: int, layout: str) -> None:
    call = paged(make(TYPE[kernel.name], DIM[kernel.name], LONG[kernel.name]), page, layout)
    check_resumed(kernel, call, copied(call))


def check_resumed(kernel: Family, call: AttentionCall, truth: AttentionCall) -> None:
    """A softmax over some tiles, and then over the others, and also left unnormalised."""
    tile = TILES[kernel.name][0]
    first = SparseMask.from_tiles(call, some(call, "both", kernel).tile_map(), tile)
    rest = SparseMask.from_tiles(call, ~first.tile_map(), tile, diagonal=False)
    plan = Plan(rest, Carry(TRITON.accumulate(call, Plan(first)), first))
    check_call(kernel, call, plan, SparseMask.full(call).to_dense(), truth=truth)
    out, lse = TRITON.accumulate(call, plan).finish()
    result = TRITON.execute(call, plan)
    assert output_error(out, result.out) <= BOUNDS[call.q.dtype]
    assert torch.allclose(lse, result.lse, atol=1e-4)
    assert untouched(call)


@each(page={"portable": [16], "hopper": PAGES["hopper"]}, value=[float("nan"), float("inf")])
def test_nan_and_infinity_of_v_reach_only_the_rows_that_see_them(kernel: Family, page: int, value: float) -> None:
    length = {"portable": 100, "hopper": 900}[kernel.name]
    plain = make(TYPE[kernel.name], DIM[kernel.name], (length, length, 2))
    plain.v[:, :, length * 2 // 3] = value
    check_spread(kernel, paged(plain, page), length * 2 // 3)


def check_spread(kernel: Family, call: AttentionCall, key: int) -> None:
    """What is no number at a key reaches the rows that see it and no others."""
    for kind in FEW:
        mask = some(call, kind, kernel)
        out = TRITON.execute(call, Plan(mask)).out
        assert torch.equal(~torch.isfinite(out).all(-1), mask.to_dense()[..., key])
    assert untouched(call)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied because it would be read often."""
    if CUDA:
        monkeypatch.setattr("sparseprefill.kernels.hopper.launch.COPY", 0)


@each(HOPPER)
def test_a_short_prompt_over_fp8_is_copied(kernel: Family) -> None:
    call = in_fp8(make(torch.bfloat16, 128, (700, 1300, 4)), 16)
    mask = some(call, "both", kernel)
    check_call(kernel, call, Plan(mask), mask.to_dense(), truth=wide(call))
    assert call.pages is not None
    assert call.pages.gathered == {"k", "v"}


def wide(call: AttentionCall) -> AttentionCall:
    """The call with keys and values of an fp8 cache as float32, which holds them exactly but for their scale."""
    assert call.pages is not None
    pages = evolve(call.pages, dtype=torch.float32)
    return copied(evolve(call, q=call.q.float(), k=pages, v=pages))


def check_fp8(kernel: Family, call: AttentionCall, plan: Plan) -> None:
    """Float64 attention's output, and nothing is copied."""
    check_call(kernel, call, plan, plan.mask.to_dense(), truth=wide(call))
    assert untouched(call)


@pytest.mark.usefixtures("in_place")
@each(
    fp8=FP8,
    dtype={"portable": (torch.float16,), "hopper": HALVES},
    dim=DIMS,
    cache=[("LBNHC", 16), ("LBHNC", 128)],
)
def test_an_fp8_cache_is_scaled_as_it_is_read(
    kernel: Family, fp8: torch.dtype, dtype: torch.dtype, dim: int, cache: tuple[str, int]
) -> None:
    layout, page = cache
    lengths = LENGTHS[kernel.name] if CUDA else [(61, 131, 2)]
    for number, size in enumerate(lengths):
        scales = ((2.0, 0.5), (0.37, 0.021))[number % 2]
        call = in_fp8(make(dtype, dim, size), page, layout, fp8, scales)
        for kind in FEW:
            check_fp8(kernel, call, Plan(some(call, kind, kernel, number)))


@pytest.mark.usefixtures("in_place")
@each(HOPPER, page=PAGES["hopper"])
def test_an_fp8_cache_without_scales(kernel: Family, page: int) -> None:
    call = in_fp8(make(torch.bfloat16, 128, (700, 1300, 4)), page, scales=None)
    for kind in ("full", "both"):
        check_fp8(kernel, call, Plan(some(call, kind, kernel)))


@pytest.mark.usefixtures("in_place")
@each(HOPPER, page=PAGES["hopper"])
def test_offsets_lengths_and_sinks_over_fp8(kernel: Family, page: int) -> None:
    call = in_fp8(featured(kernel, FEATURES[kernel.name][0]), page)
    for kind in FEW:
        check_fp8(kernel, call, Plan(some(call, kind, kernel)))


@pytest.mark.usefixtures("in_place")
@each(HOPPER, dim=[64, 256], scales=[(2.0, 0.5), (0.37, 0.021)])
def test_states_over_fp8_are_resumed(kernel: Family, dim: int, scales: tuple[float, float]) -> None:
    call = in_fp8(make(torch.bfloat16, dim, (700, 1300, 4)), 16, scales=scales)
    check_resumed(kernel, call, wide(call))


@pytest.mark.usefixtures("in_place")
@each(HOPPER, value=[math.nan, math.inf])
def test_nan_and_infinity_of_fp8_reach_only_the_rows_that_see_them(kernel: Family, value: float) -> None:
    """Of the two types e5m2 alone has infinity."""
    for fp8 in FP8[kernel.name] if math.isnan(value) else (torch.float8_e5m2,):
        for at in ("k", "v"):
            plain = make(torch.bfloat16, 128, (900, 900, 2))
            getattr(plain, at)[:, :, 700] = value
            check_spread(kernel, in_fp8(plain, 16, stored=fp8), 700)


@pytest.mark.usefixtures("in_place")
@each(HOPPER, dtype=HALVES, fp8=FP8)
def test_every_number_of_fp8_is_converted_exactly(kernel: Family, dtype: torch.dtype, fp8: torch.dtype) -> None:
    """One key a row: its value comes out as it is."""
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(fp8)
    finite = every[every.float().isfinite()].float()
    call = make(dtype, 256, (256, 256, 1))
    call.v[:] = 0.0
    call.v[..., : finite.numel()] = finite.to(dtype)
    call = in_fp8(call, 16, stored=fp8, scales=(1.0, 1.0))
    found = TRITON.execute(call, Plan(SparseMask.full(call)))
    assert torch.equal(found.out[0, 0, 0, : finite.numel()].float(), finite)
    assert untouched(call)


@pytest.mark.usefixtures("in_place")
@each(HOPPER, kind=["tiles", "stripes", "both", "wide", "full"])
def test_long_calls_over_fp8_match_those_of_tensors(kernel: Family, kind: str) -> None:
    """Many items a program, long lists, a chunk behind a cached prefix."""
    call = in_fp8(make(torch.bfloat16, 128, (4096, 16384, 4), q_offset=12288), 16)
    plan = Plan(long_mask(call, kind))
    flat = TRITON.execute(copied(call), plan)
    for _ in range(5):  # a race shows now and then
        found = TRITON.execute(call, plan)
        assert untouched(call)
        assert float((found.lse - flat.lse).abs().nan_to_num(0.0).amax()) <= 1e-4
        assert output_error(found.out, flat.out) <= SAME[torch.bfloat16]


@each(HOPPER, page=PAGES["hopper"], kind=["tiles", "stripes", "both", "wide", "full"])
def test_long_calls_match_those_of_tensors(kernel: Family, page: int, kind: str) -> None:
    """Many items a program, long lists; and the portable kernel on the same pages."""
    plain = make(torch.bfloat16, 128, (16384, 16384, 4))
    call = paged(plain, page)
    plan = Plan(long_mask(call, kind))
    flat = TRITON.execute(plain, plan)
    for _ in range(3):  # a race shows now and then
        found = TRITON.execute(call, plan)
        assert float((found.lse - flat.lse).abs().nan_to_num(0.0).amax()) <= 1e-4
        assert output_error(found.out, flat.out) <= 1e-4
    portable = TritonExecutor(kernels=(PORTABLE,))
    assert output_error(portable.execute(call, plan).out, flat.out) <= BOUNDS[torch.bfloat16]
    assert untouched(call)


@each(HOPPER)
def test_heads_of_a_part(kernel: Family) -> None:
    call = paged(make(torch.bfloat16, 128, (700, 700, 4)), 16)
    assert call.pages is not None
    narrow = call.pages.narrow(slice(1, 2), 600)
    part = evolve(call, q=call.q[:, 4:, :600], k=narrow, v=narrow)
    check(kernel, part, Plan(SparseMask.full(part)))


@settings(max_examples=40 if CUDA else 8)
@given(st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    plain = data.draw(
        calls(max_batch=1, max_heads=4, head_dims=(64,), max_len=200 if CUDA else 60, dtypes=DTYPES, device=DEVICE)
    )
    page, layout = data.draw(st.sampled_from(ANY_PAGE)), data.draw(st.sampled_from(sorted(LAYOUTS)))
    call = paged(plain, page, layout, seed=data.draw(st.integers(0, 99)))
    check(PORTABLE, call, Plan(data.draw(masks(call, tiles=(16, 32)))))


def test_parts_of_a_long_call_read_their_own_pages() -> None:
    made = build("streaming", sink=16, window=40, block=16)
    cut = Pipeline(made.estimator, executor=TRITON, workspace=1)
    call = paged(make(torch.float16, 64, (2100, 2150, 2) if CUDA else (80, 90, 2)), 16)
    result = cut.run(call)
    assert untouched(call)
    whole = evolve(cut, executor=REFERENCE, workspace=None).run(copied(call))
    assert output_error(result.out, whole.out) <= BOUNDS[call.q.dtype]
