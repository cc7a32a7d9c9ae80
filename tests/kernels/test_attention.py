"""Attention kernels against float64 attention: dtypes, head dimensions, lengths, GQA ratios, features, masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.families import only
from kernels.device import BOUNDS, CUDA, DEVICE, DTYPES, HEAD_DIMS, TMA
from kernels.each import HALVES, TRITON, check, each, far, portable_unless_named
from kernels.requests import long_mask, mask_of
from sparseprefill import AttentionCall, Carry, Plan, SparseMask, output_error
from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.family.record import Family
from sparseprefill.kernels.hopper.record import HOPPER
from sparseprefill.testing import attention, tensors

__all__ = ["portable_unless_named"]
# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LENGTHS = {
    "portable": [(1, 1, 1), (17, 17, 4), (127, 300, 1), (129, 129, 8), (1000, 1000, 4)],
    "hopper": [(1, 1, 1), (127, 300, 1), (128, 128, 4), (129, 129, 8), (257, 1021, 4), (1500, 1500, 2)],
}
if not CUDA:
    LENGTHS["portable"] = [(1, 1, 1), (17, 40, 2)]
FEATURES = {"portable": ("plain", "padded", "window"), "hopper": ("plain", "padded")}
TYPES = {"portable": DTYPES, "hopper": HALVES}
DIMS = {"portable": HEAD_DIMS, "hopper": (64, 128, 256)}
TILES = {"portable": [(64, 32) if CUDA else (32, 16)], "hopper": [(128, 128), (128, 64), (256, 128)]}
KINDS = {"portable": ["both", "wide"], "hopper": ["both", "wide", "stripes", "wide stripes"]}


def make(
    kernel: Family, kind: str, dtype: torch.dtype, head_dim: int, lengths: tuple[int, int, int], feature: str
) -> AttentionCall:
    q_len, kv_len, group = lengths
    kv_heads = 2 if CUDA else 1
    q, k, v = tensors(
        kind, batch=2, heads=group * kv_heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        strided=kv_len % 2 == 0, device=DEVICE, dtype=dtype,
    )  # fmt: skip
    if feature == "plain":
        return AttentionCall(q, k, v)
    if feature == "window":
        return AttentionCall(q, k, v, window=max(1, kv_len // 3))
    starts = torch.tensor([0, kv_len // 4], dtype=torch.int32, device=DEVICE)
    reals = torch.tensor([kv_len, kv_len - kv_len // 4 - kv_len // 8], dtype=torch.int32, device=DEVICE)
    sinks = torch.linspace(-1, 3, group * kv_heads, device=DEVICE)
    softcap = 8.0 if kernel.features.softcap else None
    return AttentionCall(q, k, v, starts=starts, lengths=reals, softcap=softcap, sinks=sinks)


def some(call: AttentionCall, kind: str, tile: tuple[int, int] = (128, 128), group: int = 2) -> SparseMask:
    """See `mask_of`."""
    width = 16 if "wide" in kind else 1
    return mask_of(call, kind.removeprefix("wide "), tile, group, call.kv_len, width)


@each(dtype=TYPES, head_dim=DIMS, feature=FEATURES, tile=TILES)
def test_masks_match_float64(
    kernel: Family, dtype: torch.dtype, head_dim: int, feature: str, tile: tuple[int, int]
) -> None:
    for number, lengths in enumerate(LENGTHS[kernel.name]):
        call = make(kernel, ("random", "sink", "stripes", "local")[number % 4], dtype, head_dim, lengths, feature)
        for kind in ("full", *KINDS[kernel.name]):
            mask = some(call, kind, tile)
            check(kernel, call, Plan(mask), mask.to_dense())


@each(dtype=TYPES, head_dim=DIMS)
def test_resuming_from_a_carry_matches_float64(kernel: Family, dtype: torch.dtype, head_dim: int) -> None:
    tile = {"portable": (32, 16), "hopper": (128, 128)}[kernel.name]
    for lengths in LENGTHS[kernel.name]:
        call = make(kernel, "random", dtype, head_dim, lengths, "padded")
        first = SparseMask.from_tiles(call, some(call, "both", tile).tile_map(), tile)
        rest = SparseMask.from_tiles(call, ~first.tile_map(), tile, diagonal=False)
        plan = Plan(rest, Carry(TRITON.accumulate(call, Plan(first)), first))
        check(kernel, call, plan, SparseMask.full(call).to_dense())
        out, lse = TRITON.accumulate(call, plan).finish(call.sinks)
        assert far(out, attention(call)[0]) <= BOUNDS[dtype]
        assert lse.shape == call.q.shape[:3]


@pytest.mark.parametrize("tma", TMA)
def test_both_ways_of_loading_give_the_same_output(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.kernels.attention import launch as launcher

    call = make(PORTABLE, "random", torch.float16, 64, LENGTHS["portable"][-1], "padded")
    seen: list[bool] = []

    def choose(*_: object) -> bool:
        seen.append(tma)
        return tma

    monkeypatch.setattr(launcher, "_tma", choose)
    mask = SparseMask.full(call, (32, 32))
    check(PORTABLE, call, Plan(mask), mask.to_dense())
    assert seen


@pytest.mark.gpu
@each(dtype=TYPES)
def test_long_odd_length(kernel: Family, dtype: torch.dtype) -> None:
    call = make(kernel, "sink", dtype, 128, (4099, 4099, 4), "plain")
    for mask in (SparseMask.full(call, 128), SparseMask.full(call, (256, 64))):
        check(kernel, call, Plan(mask), call.geometry.visible()[:, None])


@each(HOPPER, tile=[(128, 128), (256, 64)], feature=FEATURES, programs=[3, 132])
def test_blocks_may_be_drawn_by_length_and_in_pieces(
    kernel: Family, tile: tuple[int, int], feature: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few programs draw several blocks each; many leave each long list to several."""
    from sparseprefill.kernels.hopper import launch

    monkeypatch.setattr(launch, "multiprocessors", lambda _: programs)
    monkeypatch.setattr(launch, "LEAST_STEPS", 1)
    for lengths in ((127, 300, 1), (257, 1021, 4), (700, 1500, 2)):
        call = make(kernel, "random", torch.bfloat16, 128, lengths, feature)
        for kind in ("both", "stripes", "wide"):
            mask = some(call, kind, tile)
            blocks = call.geometry.tile_rows(tile[0]) * (tile[0] // 128)
            assert launch._draws(call, mask, blocks) is not None
            check(kernel, call, Plan(mask), mask.to_dense())


def uneven(call: AttentionCall, kind: str) -> SparseMask:
    """Some keys, and for the last query tile all of them, as behind a dense tail."""
    g = call.geometry
    tail = torch.zeros(1, 1, g.tile_rows(128), g.tile_columns(128), dtype=torch.bool, device=DEVICE)
    tail[:, :, -1] = True
    return some(call, kind, group=1) | SparseMask.from_tiles(call, tail)


@each(HOPPER, dtype=HALVES, head_dim=(64, 128, 256), kind=("full", "tiles", "both", "wide"))
def test_long_lists_are_cut(kernel: Family, dtype: torch.dtype, head_dim: int, kind: str) -> None:
    from sparseprefill.kernels.family.chips import multiprocessors
    from sparseprefill.kernels.hopper import launch
    from sparseprefill.kernels.lists.order import most_pieces

    for q_len, kv_len in ((1, 9001), (127, 8191), (129, 16384), (1000, 10007)):
        call = make(kernel, "sink", dtype, head_dim, (q_len, kv_len, 2), "plain")
        mask = SparseMask.full(call) if kind == "full" else uneven(call, kind)
        draws = launch._draws(call, mask, call.geometry.tile_rows(128))
        assert draws is not None
        words = draws.words[2 : 1 + 2 * int(draws.words[0]) : 2]
        assert int(words.max()) >> 16 > 1, "nothing is cut"
        assert int((words >> 16 > 1).sum()) <= most_pieces(multiprocessors(call.q.device))
        check(kernel, call, Plan(mask), mask.to_dense())
        first, again = (TRITON.execute(call, Plan(mask)) for _ in range(2))
        assert torch.equal(first.out, again.out)  # one run is like another
        assert torch.equal(first.lse, again.lse)


@each(HOPPER, dtype=HALVES, head_dim=(64, 128, 256), kind=("tiles", "both", "wide"))
def test_the_last_rows_of_a_whole_prompt_are_cut(kernel: Family, dtype: torch.dtype, head_dim: int, kind: str) -> None:
    from sparseprefill.kernels.hopper import launch

    for length in (2177, 4099, 8192):
        call = make(kernel, "sink", dtype, head_dim, (length, length, 2), "plain")
        rows = call.geometry.tile_rows(128)
        mask = some(call, kind, group=1).with_dense_rows((rows - 1, rows))
        draws = launch._draws(call, mask, rows)
        assert draws is not None
        assert int(draws.words[2]) >> 16 > 1, "nothing is cut"
        check(kernel, call, Plan(mask), mask.to_dense())


@each(HOPPER, head_dim=(64, 128, 256))
def test_long_lists_are_cut_behind_a_carry_and_for_a_state(kernel: Family, head_dim: int) -> None:
    call = make(kernel, "random", torch.bfloat16, head_dim, (300, 9000, 2), "plain")
    even = torch.arange(call.geometry.tile_columns(128), device=DEVICE) % 2 == 0
    full = SparseMask.full(call)
    first, rest = (SparseMask.from_tiles(call, full.tile_map() & keep, diagonal=False) for keep in (even, ~even))
    plan = Plan(rest, Carry(TRITON.accumulate(call, Plan(first)), first))
    check(kernel, call, plan, full.to_dense())
    out, _ = TRITON.accumulate(call, plan).finish()
    assert far(out, attention(call)[0]) <= BOUNDS[torch.bfloat16]


@each(HOPPER, value=[float("nan"), float("inf")])
def test_nan_and_infinity_in_one_piece_are_those_of_the_block(kernel: Family, value: float) -> None:
    call = make(kernel, "random", torch.bfloat16, 128, (200, 9000, 2), "plain")
    call.v[:, :, 3000] = value
    mask = uneven(call, "tiles")
    out = TRITON.execute(call, Plan(mask)).out
    assert torch.equal(~torch.isfinite(out).all(-1), mask.to_dense()[..., 3000])


@each(HOPPER)
def test_states_of_parts_merge_to_the_whole(kernel: Family) -> None:
    call = make(kernel, "random", torch.bfloat16, 128, (700, 1300, 4), "padded")
    full = SparseMask.full(call)
    even = torch.arange(call.geometry.tile_columns(128), device=DEVICE) % 2 == 0
    parts = [SparseMask.from_tiles(call, full.tile_map() & keep, diagonal=False) for keep in (even, ~even)]
    out, _ = TRITON.accumulate(call, Plan(parts[0])).merge(TRITON.accumulate(call, Plan(parts[1]))).finish(call.sinks)
    assert output_error(out, TRITON.execute(call, Plan(full)).out) <= BOUNDS[torch.bfloat16]


@each(HOPPER, value=[float("nan"), float("inf")])
def test_nan_and_infinity_of_v_reach_only_the_rows_that_see_them(kernel: Family, value: float) -> None:
    call = make(kernel, "random", torch.bfloat16, 128, (900, 900, 2), "plain")
    call.v[:, :, 700] = value
    for mask in (SparseMask.full(call), some(call, "both"), some(call, "stripes")):
        out = TRITON.execute(call, Plan(mask)).out
        assert torch.equal(~torch.isfinite(out).all(-1), mask.to_dense()[..., 700])


@each(HOPPER, kind=["tiles", "stripes", "both", "wide", "full"])
def test_long_calls_match_the_portable_kernel(kernel: Family, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many items a program, long lists, four thousand gathered rows: what short calls cannot show."""
    shape: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": 16384, "kv_len": 16384, "head_dim": 128}
    call = AttentionCall(*tensors("random", device=DEVICE, dtype=torch.bfloat16, **shape))
    mask = long_mask(call, kind)
    for _ in range(3):  # a race shows now and then
        special = TRITON.execute(call, Plan(mask))
        with monkeypatch.context() as patch:
            only(patch)
            plain = TRITON.execute(call, Plan(mask))
        assert float((special.lse - plain.lse).abs().nan_to_num(0.0).amax()) <= 1e-4
        assert output_error(special.out, plain.out) <= BOUNDS[torch.bfloat16]


@each(HOPPER)
def test_same_call_gives_the_same_bits(kernel: Family) -> None:
    call = make(kernel, "stripes", torch.bfloat16, 128, (1500, 1500, 2), "padded")
    plan = Plan(some(call, "both"))
    first = TRITON.execute(call, plan)
    for _ in range(5):
        again = TRITON.execute(call, plan)
        assert torch.equal(first.out, again.out)
        assert torch.equal(first.lse, again.lse)
