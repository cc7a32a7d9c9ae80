"""The identification kernels against their plain-PyTorch twin: the same stripes, in any launch shape."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sparseprefill.plugins.anchor_attention import kernels, layout, stages
from sparseprefill.plugins.anchor_attention.kernels import compact_kernel, pool_kernel, score_kernel
from sparseprefill.plugins.anchor_attention.layout import Regions

from kernels.device import CUDA, DEVICE, DTYPES, TMA
from sparseprefill import AttentionCall
from sparseprefill.kernels.family.chips import row
from sparseprefill.kernels.settings import Settings
from sparseprefill.mask.lists import IndexLists
from sparseprefill.testing import tensors

# numpy, which the interpreter computes with, warns of the infinities that thresholds live with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SMALL = Settings(64, 64, 4, 2, tma=False)


def make(heads: tuple[int, int] = (3, 1), q_len: int = 123, kv_len: int = 131, **options: Any) -> AttentionCall:
    """A call whose logits spread over about +-5."""
    dtype = options.pop("dtype", torch.float16)
    shape = {
        "batch": options.pop("batch", 2),
        "heads": heads[0],
        "kv_heads": heads[1],
        "q_len": q_len,
        "kv_len": kv_len,
        "head_dim": 64,
    }
    return AttentionCall(*tensors("stripes", **shape, device=DEVICE, dtype=dtype), **options)


def maxima(call: AttentionCall, spread: float = 1.5) -> torch.Tensor:
    """Row maxima as an anchor pass might give them: another threshold for each head and block."""
    generator = torch.Generator().manual_seed(1)
    return (2 + spread * torch.randn(*call.q.shape[:3], generator=generator)).to(DEVICE)


def same(call: AttentionCall, regions: Regions, m: torch.Tensor, theta: float, **options: Any) -> torch.Tensor:
    """Assert that both find the same lists; their counts."""
    expected = stages.stripes(call, regions, m, theta, **options)
    actual = IndexLists(*kernels.stripes(call, regions, m, theta, **options))
    assert torch.equal(expected.counts, actual.counts)
    columns = call.k.shape[2]
    assert torch.equal(expected.to_map(columns), actual.to_map(columns))
    entry, index = actual.padded(columns)
    assert bool(((index[..., 1:] > index[..., :-1]) | ~entry[..., 1:]).all())
    return actual.counts


def rows(*values: int) -> torch.Tensor:
    """One int32 per batch row."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "starts": {"starts": rows(0, 17)},
    "late": {"starts": rows(101, 7), "lengths": rows(20, 124)},
    "lengths": {"lengths": rows(131, 70)},
    "offset": {"q_offset": 5},
}


@pytest.mark.parametrize("theta", [0.5, math.inf])
@pytest.mark.parametrize("feature", FEATURES)
def test_stripes_equal_those_of_plain_pytorch(feature: str, theta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "settings", lambda *_: SMALL)
    call = make(**FEATURES[feature])
    assert bool(same(call, Regions(16, 3, 24), maxima(call), theta).any())


@pytest.mark.parametrize(("block", "step"), [(16, 1), (16, 2), (12, 5), (4, 20), (2, 40)])
def test_any_block_and_step(block: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "settings", lambda *_: SMALL)
    call = make((3, 1), 100, 115, batch=1)
    assert bool(same(call, Regions(block, step, 8), maxima(call), 0.5).any())


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 1), (16, 1)])
@pytest.mark.parametrize("tma", TMA)
def test_any_sharing_of_heads(heads: tuple[int, int], tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "settings", lambda *_: Settings(64, 64, 4, 2, tma=tma))
    call = make(heads, 70, 97, batch=1)
    assert bool(same(call, Regions(8, 4, 8), maxima(call), 0.5).any())


@pytest.mark.parametrize("shape", [(128, 64), (64, 128), (256, 64)])
def test_any_launch_shape(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "settings", lambda *_: Settings(*shape, 4, 2, tma=False))
    call = make((4, 1), 150, 311, batch=1)
    assert bool(same(call, Regions(16, 2, 40), maxima(call), 0.5).any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 97, 128, 129])
def test_any_length_and_dtype(length: int, dtype: torch.dtype) -> None:
    call = make((2, 1), length, length, dtype=dtype, batch=1)
    same(call, Regions(16, 2, 16), maxima(call), 0.25)


def test_without_an_anchor_and_below_every_logit() -> None:
    call = make((2, 1), 129, 129, batch=1)
    assert bool(same(call, Regions(16, 4, 16), maxima(call), -2.0, use_anchor=False).any())
    assert not bool(same(call, Regions(16, 4, 16), maxima(call), -math.inf).any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("above", [0.0, 1e-4, -1e-4])
def test_logits_at_the_threshold_are_settled_exactly(above: float, dtype: torch.dtype) -> None:
    q, k, v = (torch.zeros(1, h, 96, 64, dtype=dtype, device=DEVICE) for h in (2, 1, 1))
    # The mean query has more bits than the first product keeps, which alone says nothing about the threshold.
    q[..., 0], k[..., 0], q[:, :, ::16, 0] = 1.0, 8.0, 1.0078125
    call = AttentionCall(q, k, v, scale=1.0)
    logit = 8 * (1 + 0.0078125 / 16)
    m = torch.full((1, 2, 96), logit + 1 + above, device=DEVICE)
    counts = same(call, Regions(16, 2, 16), m, 1.0)
    assert bool(counts.any()) == (above <= 0)


def test_nan_selects_its_key_and_infinities_are_weighed() -> None:
    call, regions = make((2, 1), dtype=torch.float32), Regions(16, 3, 24)
    call.k[0, 0, 50], call.k[1, 0, 51, 3], call.k[0, 0, 60, 5] = math.nan, math.inf, -math.inf
    m = maxima(call)
    assert bool((same(call, regions, m, -1e9)[0, :, 2:] >= 1).all())
    m[0, 1, 100], call.q[1, 1, 110, 7] = math.nan, math.nan
    same(call, regions, m, 0.0)


def test_lists_begin_where_the_room_of_earlier_groups_ends() -> None:
    regions, call = Regions(16, 2, 70), make((1, 1), 80, 163)
    lists = IndexLists(*kernels.stripes(call, regions, maxima(call), math.inf))
    first, groups = call.geometry.q_offset // 32, lists.counts.shape[-1]
    rooms = [max((first + row) * 32 - 70, 0) for row in range(groups)]
    assert lists.offsets[0, 0].tolist() == [sum(rooms[:row]) for row in range(groups)]
    assert lists.counts[0, 0].tolist() == rooms
    assert lists.indices.numel() == 2 * sum(rooms)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (8, 1), (2, 2)])
def test_long_calls_find_what_float32_finds(heads: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = tensors(
        "sink", batch=1, heads=heads[0], kv_heads=heads[1], q_len=9000, kv_len=12000, head_dim=128, device="cuda",
        dtype=dtype,
    )  # fmt: skip
    call, regions = AttentionCall(q, k, v), Regions(128, 16, 128)
    m = torch.full(q.shape[:3], 7.0, device="cuda")
    expected = stages.stripes(call, regions, m, 6.5).to_map(12000)
    actual = IndexLists(*kernels.stripes(call, regions, m, 6.5)).to_map(12000)
    assert 0.01 < float(expected.float().mean()) < 0.5
    assert int((expected ^ actual).sum()) <= 1e-5 * int(expected.sum())


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "block"), [(4096, 128), (9001, 128), (5000, 16)])
def test_workspace_bounds_what_an_estimate_takes(length: int, block: int) -> None:
    from sparseprefill import Memory, build

    q, k, v = tensors("sink", batch=2, heads=4, kv_heads=2, q_len=length, kv_len=length, head_dim=64, device="cuda")
    call = AttentionCall(q, k, v)
    estimator: Any = build("anchor-attention", block=block).estimator
    estimator.estimate(call, Memory())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = estimator.estimate(call, Memory())
    assert torch.cuda.max_memory_allocated() - before <= estimator.workspace(call)
    assert plan.carry is not None


def test_settings_fit_the_scoring_kernel() -> None:
    for capability in ((0, 0), (8, 0), (9, 0), (10, 0), (12, 0)):
        for width, size in ((64, 2), (128, 4), (256, 2)):
            chosen = kernels.settings(row(capability), width, size)
            assert chosen.block_m % layout.WORD == 0
            assert chosen.block_n >= 4 * layout.STEP_PART
            assert chosen.tma == row(capability).large
    assert CUDA or not kernels.choose(make()).tma


@pytest.mark.gpu
def test_nothing_recompiles_when_only_the_length_changes() -> None:
    kinds: tuple[Any, ...] = (pool_kernel, score_kernel, compact_kernel)
    compiled = []
    for length in (4096, 4097, 5000, 6144, 300, 9999):
        call = make((4, 2), length, length, batch=1, dtype=torch.bfloat16)
        kernels.stripes(call, Regions(128, 2, 128), maxima(call), 1.0)
        compiled.append([sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kinds])
    assert all(one == compiled[0] for one in compiled), compiled
