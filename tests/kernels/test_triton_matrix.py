"""The Triton executor against float64 attention: dtypes, head dimensions, lengths, GQA ratios, features, masks."""

from __future__ import annotations

import pytest
import torch

from kernels.device import BOUNDS, CUDA, DEVICE, DTYPES, HEAD_DIMS, TMA
from kernels.requests import mask_of
from sparseprefill import AttentionCall, Carry, Plan, SparseMask, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import attention, tensors

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRITON = TritonExecutor()
LENGTHS = [(1, 1, 1), (17, 17, 4), (127, 300, 1), (129, 129, 8), (1000, 1000, 4)]
if not CUDA:
    LENGTHS = [(1, 1, 1), (17, 40, 2)]
FEATURES = ("plain", "padded", "window")


def make(kind: str, dtype: torch.dtype, head_dim: int, lengths: tuple[int, int, int], feature: str) -> AttentionCall:
    q_len, kv_len, group = lengths
    heads, batch = group * (2 if CUDA else 1), 2
    q, k, v = tensors(
        kind, batch=batch, heads=heads, kv_heads=heads // group, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        strided=kv_len % 2 == 0, device=DEVICE, dtype=dtype,
    )  # fmt: skip
    if feature == "plain":
        return AttentionCall(q, k, v)
    if feature == "window":
        return AttentionCall(q, k, v, window=max(1, kv_len // 3))
    starts = torch.tensor([0, kv_len // 4], dtype=torch.int32, device=DEVICE)
    lengths_ = torch.tensor([kv_len, kv_len - kv_len // 4 - kv_len // 8], dtype=torch.int32, device=DEVICE)
    sinks = torch.linspace(-1, 3, heads, device=DEVICE)
    return AttentionCall(q, k, v, starts=starts, lengths=lengths_, softcap=8.0, sinks=sinks)


def mixed(call: AttentionCall, tile: tuple[int, int], width: int = 1) -> SparseMask:
    """Tiles and stripes that overlap."""
    return mask_of(call, "both", tile, group=4, width=width)


def check(call: AttentionCall, plan: Plan, keep: torch.Tensor) -> None:
    result = TRITON.execute(call, plan)
    out, lse = attention(call, keep)
    bound = BOUNDS[call.q.dtype]
    assert not bool(result.out.isnan().any())
    assert output_error(result.out, out) <= bound
    assert torch.equal(lse == -torch.inf, result.lse == -torch.inf)
    real = lse != -torch.inf
    assert float((result.lse - lse)[real].abs().max()) <= 1e-3
    assert result.out[~real].abs().sum() == 0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_full_and_mixed_masks_match_float64(feature: str, dtype: torch.dtype, head_dim: int) -> None:
    for number, lengths in enumerate(LENGTHS):
        call = make(("random", "sink", "stripes", "local")[number % 4], dtype, head_dim, lengths, feature)
        tile = (64, 32) if CUDA else (32, 16)
        for mask in (SparseMask.full(call, tile), mixed(call, tile), mixed(call, tile, width=16)):
            check(call, Plan(mask), mask.to_dense())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resuming_from_a_carry_matches_float64(dtype: torch.dtype, head_dim: int) -> None:
    for lengths in LENGTHS:
        call = make("random", dtype, head_dim, lengths, "plain")
        g, tile = call.geometry, (32, 16)
        first = SparseMask.from_tiles(call, mixed(call, tile).tile_map(), tile)
        rest = SparseMask.from_tiles(call, ~first.tile_map(), tile, diagonal=False)
        state = TRITON.accumulate(call, Plan(first))
        check(call, Plan(rest, Carry(state, first)), call.geometry.visible()[:, None])
        out, lse = TRITON.accumulate(call, Plan(rest, Carry(state, first))).finish()
        assert output_error(out, attention(call)[0]) <= BOUNDS[dtype]
        assert lse.shape == (g.batch, g.heads, g.q_len)


@pytest.mark.parametrize("tma", TMA)
def test_both_ways_of_loading_give_the_same_output(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.kernels.attention import launch as launcher

    call = make("random", torch.float16, 64, LENGTHS[-1], "padded")
    seen: list[bool] = []

    def choose(*_: object) -> bool:
        seen.append(tma)
        return tma

    monkeypatch.setattr(launcher, "_tma", choose)
    mask = SparseMask.full(call, (32, 32))
    check(call, Plan(mask), mask.to_dense())
    assert seen


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_odd_length(dtype: torch.dtype) -> None:
    call = make("sink", dtype, 128, (4099, 4099, 4), "plain")
    for mask in (SparseMask.full(call, 128), SparseMask.full(call, (256, 64))):
        check(call, Plan(mask), call.geometry.visible()[:, None])
