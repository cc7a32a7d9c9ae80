"""The warp-specialised kernel of capability 9.0 against float64 attention and against the portable kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.families import chosen, only
from kernels.device import BOUNDS, HOPPER
from kernels.requests import mask_of
from sparseprefill import AttentionCall, Carry, Plan, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import attention, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of capability 9.0")]
TRITON = TritonExecutor()
HALVES = (torch.float16, torch.bfloat16)
LENGTHS = [(1, 1, 1), (127, 300, 1), (128, 128, 4), (129, 129, 8), (257, 1021, 4), (1500, 1500, 2)]
FEATURES = ("plain", "padded")


def make(kind: str, dtype: torch.dtype, width: int, lengths: tuple[int, int, int], feature: str) -> AttentionCall:
    q_len, kv_len, group = lengths
    q, k, v = tensors(
        kind, batch=2, heads=group * 2, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=width,
        strided=kv_len % 2 == 0, device="cuda", dtype=dtype,
    )  # fmt: skip
    if feature == "plain":
        return AttentionCall(q, k, v)
    starts = torch.tensor([0, kv_len // 4], dtype=torch.int32, device="cuda")
    reals = torch.tensor([kv_len, kv_len - kv_len // 4 - kv_len // 8], dtype=torch.int32, device="cuda")
    return AttentionCall(q, k, v, starts=starts, lengths=reals, sinks=torch.linspace(-1, 3, group * 2, device="cuda"))


def mixed(
    call: AttentionCall, tile: tuple[int, int], *, both: bool = True, group: int = 2, width: int = 1
) -> SparseMask:
    """Tiles and stripes that overlap, or stripes alone."""
    return mask_of(call, "both" if both else "stripes", tile, group, call.geometry.kv_len, width)


def far(out: torch.Tensor, truth: torch.Tensor) -> float:
    """`output_error`; 0 where no row has a key, so that both are zeros."""
    return 0.0 if bool((out == 0).all()) and bool((truth == 0).all()) else output_error(out, truth)


def check(call: AttentionCall, plan: Plan, keep: torch.Tensor, truth: AttentionCall | None = None) -> None:
    """truth: the same call of tensors, where this one is of pages."""
    assert chosen(call, plan.mask).family.name == "hopper"
    result = TRITON.execute(call, plan)
    out, lse = attention(call if truth is None else truth, keep)
    assert not bool(result.out.isnan().any())
    assert far(result.out, out) <= BOUNDS[call.q.dtype]
    assert torch.equal(lse == -torch.inf, result.lse == -torch.inf)
    real = lse != -torch.inf
    assert bool(((result.lse - lse)[real].abs() <= 1e-3).all())
    assert result.out[~real].abs().sum() == 0


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("tile", [(128, 128), (128, 64), (256, 128)], ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masks_match_float64(dtype: torch.dtype, width: int, tile: tuple[int, int], feature: str) -> None:
    for number, lengths in enumerate(LENGTHS):
        call = make(("random", "sink", "stripes", "local")[number % 4], dtype, width, lengths, feature)
        striped = (mixed(call, tile, both=both, width=columns) for both in (True, False) for columns in (1, 16))
        for mask in (SparseMask.full(call, tile), *striped):
            check(call, Plan(mask), mask.to_dense())


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_resuming_from_a_carry_matches_float64(dtype: torch.dtype, width: int) -> None:
    for lengths in LENGTHS:
        call = make("random", dtype, width, lengths, "padded")
        keep = mixed(call, (128, 128)).tile_map()
        first = SparseMask.from_tiles(call, keep, (128, 128))
        rest = SparseMask.from_tiles(call, ~first.tile_map(), (128, 128), diagonal=False)
        carry = Carry(TRITON.accumulate(call, Plan(first)), first)
        check(call, Plan(rest, carry), SparseMask.full(call).to_dense())


@pytest.mark.parametrize("tile", [(128, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_blocks_may_be_drawn_by_length(feature: str, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.kernels.hopper import launch

    monkeypatch.setattr(launch, "multiprocessors", lambda _: 3)  # few programs, each of which draws several blocks
    for lengths in ((127, 300, 1), (257, 1021, 4), (700, 1500, 2)):
        call = make("random", torch.bfloat16, 128, lengths, feature)
        for mask in (mixed(call, tile), mixed(call, tile, both=False)):
            blocks = call.geometry.tile_rows(tile[0]) * (tile[0] // 128)
            assert launch._order(call, mask, blocks) is not None
            check(call, Plan(mask), mask.to_dense())


def test_states_of_parts_merge_to_the_whole() -> None:
    call = make("random", torch.bfloat16, 128, (700, 1300, 4), "padded")
    full = SparseMask.full(call)
    even = torch.arange(call.geometry.tile_columns(128), device="cuda") % 2 == 0
    parts = [SparseMask.from_tiles(call, full.tile_map() & keep, diagonal=False) for keep in (even, ~even)]
    out, _ = TRITON.accumulate(call, Plan(parts[0])).merge(TRITON.accumulate(call, Plan(parts[1]))).finish(call.sinks)
    assert output_error(out, TRITON.execute(call, Plan(full)).out) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_of_v_reach_only_the_rows_that_see_them(value: float) -> None:
    call = make("random", torch.bfloat16, 128, (900, 900, 2), "plain")
    call.v[:, :, 700] = value
    for mask in (SparseMask.full(call), mixed(call, (128, 128)), mixed(call, (128, 128), both=False)):
        out = TRITON.execute(call, Plan(mask)).out
        sees = mask.to_dense()[..., 700]
        assert torch.equal(~torch.isfinite(out).all(-1), sees)


def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)


@pytest.mark.parametrize("kind", ["tiles", "stripes", "both", "wide", "full"])
def test_long_calls_match_the_portable_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many items a program, long lists, four thousand gathered rows: what short calls cannot show."""
    shape: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": 16384, "kv_len": 16384, "head_dim": 128}
    call = AttentionCall(*tensors("random", device="cuda", dtype=torch.bfloat16, **shape))
    g = call.geometry
    tiles = SparseMask.from_tiles(call, torch.rand(1, 8, g.tile_rows(128), g.tile_columns(128), device="cuda") < 0.1)
    stripes = mixed(call, (128, 128), both=False, group=16, width=16 if kind == "wide" else 1)
    made = {"tiles": tiles, "stripes": stripes, "both": tiles | stripes, "wide": tiles | stripes}
    mask = made.get(kind, SparseMask.full(call))
    for _ in range(3):  # a race shows now and then
        special = TRITON.execute(call, Plan(mask))
        with monkeypatch.context() as patch:
            portable(patch)
            plain = TRITON.execute(call, Plan(mask))
        assert float((special.lse - plain.lse).abs().nan_to_num(0.0).amax()) <= 1e-4
        assert output_error(special.out, plain.out) <= BOUNDS[torch.bfloat16]


def test_same_call_gives_the_same_bits() -> None:
    call = make("stripes", torch.bfloat16, 128, (1500, 1500, 2), "padded")
    plan = Plan(mixed(call, (128, 128)))
    first = TRITON.execute(call, plan)
    for _ in range(5):
        again = TRITON.execute(call, plan)
        assert torch.equal(first.out, again.out)
        assert torch.equal(first.lse, again.lse)
