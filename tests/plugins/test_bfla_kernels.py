"""BFLA's kernels against its plain-PyTorch path: scores, masses and tiles, in any launch shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.bfla import kernels
from sparseprefill.plugins.bfla.stages import block_scores, capped, keep_blocks

from kernels.groups import CUDA, DTYPES, SMALL, TMA, grouped_calls, make, small_settings
from sparseprefill import AttentionCall, PriorityScores, SparseMask, build
from sparseprefill.kernels.statistics.softmax import tile_softmax, tile_softmax_kernel
from sparseprefill.mask.geometry import reachable_map, regrid

# numpy, which the interpreter computes with, warns of the infinities and NaNs that belong here
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FEW = settings(max_examples=60 if CUDA else 8, deadline=None)
SIZES = st.sampled_from([(16, 4), (32, 8), (48, 6), (16, 16), (64, 4)])


def same(call: AttentionCall, block: int, size: int, rounding: float = 1e-3) -> None:
    """Scores of blocks with a causal pair (but for `rounding`), shares, nonfinite blocks, tiles for the same choice."""
    geometry, alpha = call.geometry, 0.3 / size
    causal = reachable_map(geometry, block, block)[:, None].expand(-1, geometry.heads, -1, -1)
    expected = block_scores(call, block, size)
    actual = kernels.block_scores(call, block, size)
    there = causal & (expected != -torch.inf)
    torch.testing.assert_close(actual[there], expected[there], rtol=1e-5, atol=rounding, equal_nan=True)
    scaled = capped(expected * alpha, call.softcap)
    keep, mass = keep_blocks(scaled, causal, 0.9)
    nonfinite = torch.empty(actual.shape, dtype=torch.uint8, device=actual.device)
    tile_softmax(call, actual, block, alpha, call.softcap, nonfinite)
    assert torch.equal(nonfinite.bool(), causal & ~(scaled < torch.inf))
    torch.testing.assert_close(actual, mass, rtol=1e-3, atol=1e-5)
    tile = block // 2
    tiles = regrid(geometry, keep, block, tile).repeat_interleave(2, -1)[..., : geometry.tile_columns(tile)]
    chosen = kernels.block_tiles(call, keep & ~nonfinite.bool(), nonfinite, block, tile)
    assert torch.equal(tiles, chosen)


@FEW
@given(call=grouped_calls(), sizes=SIZES, tile=SMALL, tma=st.sampled_from(TMA))
def test_equal_plain_pytorch(call: AttentionCall, sizes: tuple[int, int], tile: tuple[int, int], tma: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_settings(patch, tile, tma)
        same(call, *sizes)


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinite_scores_are_kept(dtype: torch.dtype, tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small_settings(monkeypatch, (16, 32), tma)
    for softcap in (None, 2.0):
        call = make(dtype, (2, 1), 150, 20, 3, softcap=softcap)
        call.k[:, :, 40, 3], call.k[:, :, 90, 2], call.q[:, 1, 120, 5] = math.nan, math.inf, -math.inf
        same(call, 32, 8)


@pytest.mark.parametrize("length", [128, 131])
def test_the_mask_is_that_of_plain_pytorch(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_settings(monkeypatch, (16, 32), TMA[-1])
    call = make(torch.float32, (4, 2), length, 0, 0)
    expected = build("bfla", block=32, group=8, tile=16, keep_mass=0.7, score_norm="mean", stride=None).estimator
    keep, mass = kernels.kept_tiles(call, 32, 8, call.softmax_scale / 8, None, 0.7, 16)
    plan = expected.estimate(AttentionCall(call.q.cpu(), call.k.cpu(), call.v.cpu()), None)  # type: ignore[arg-type]
    assert torch.equal(plan.mask.to_dense(), SparseMask.from_tiles(call, keep, 16).to_dense().cpu())
    assert isinstance(plan.priority, PriorityScores)
    torch.testing.assert_close(plan.priority.tiles, mass.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_len", "before"), [(4096, 0), (3001, 1095), (1000, 64)])
def test_equal_plain_pytorch_in_production_settings(dtype: torch.dtype, width: int, q_len: int, before: int) -> None:
    same(make(dtype, (8, 2), q_len, before, 0, width=width), 256, 64, 3e-2)
    same(make(dtype, (8, 2), q_len, before, 0, width=width, starts=[0, 77], strided=True), 128, 4, 3e-2)


@pytest.mark.gpu
def test_nothing_recompiles_when_only_the_length_changes() -> None:
    compiled = []
    for length in (8192, 10240, 12288, 8320):
        kernels.kept_tiles(make(torch.bfloat16, (8, 2), length, 0, 0, width=128), 256, 64, 0.1, None, 0.9, 128)
        used = (kernels.block_scores_kernel, tile_softmax_kernel, kernels.block_tiles_kernel)
        compiled.append([len(cache[0]) for kernel in used for cache in kernel.device_caches.values()])
    assert all(some == compiled[0] for some in compiled), compiled
