"""The identification kernel against its plain-PyTorch twin: the same stripes, in any launch shape."""

from __future__ import annotations

import math

import pytest
import torch
from sparseprefill.plugins.anchor_attention import identify, kernels
from sparseprefill.plugins.anchor_attention.regions import Regions

from kernels.device import DEVICE
from sparseprefill import AttentionCall
from sparseprefill.pooling import tile_mean
from sparseprefill.testing import tensors


@pytest.mark.parametrize("theta", [0.5, math.inf, -math.inf])
@pytest.mark.parametrize(("step", "columns"), [(3, 64), (1, 64), (8, 64), (5, 4), (5, 2)])
@pytest.mark.parametrize("feature", ["plain", "softcap", "padded", "offset"])
def test_stripes_equal_those_of_plain_pytorch(
    feature: str, step: int, columns: int, theta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "COLUMNS", columns)
    q, k, v = tensors(
        "stripes", batch=2, heads=6, kv_heads=2, q_len=250, kv_len=263, head_dim=64, device=DEVICE, dtype=torch.float16
    )
    starts = torch.tensor([0, 30], dtype=torch.int32, device=DEVICE)
    options = {"plain": {}, "softcap": {"softcap": 3.0}, "padded": {"starts": starts}, "offset": {"q_offset": 5}}
    call = AttentionCall(q, k, v, **options[feature])  # type: ignore[arg-type]
    regions = Regions(16, step, 24)
    pooled = tile_mean(call.q, call.geometry, 16)
    anchor = torch.linspace(-1, 1, pooled.shape[2], device=DEVICE).expand(pooled.shape[:3]).contiguous()
    expected = identify.stripes(call, regions, pooled, anchor, theta)
    actual = kernels.stripes(call, regions, pooled, anchor, theta)
    assert torch.equal(expected.counts, actual.counts)
    assert torch.equal(expected.to_map(263), actual.to_map(263))
    assert bool(expected.counts.any()) == (theta > -math.inf)
