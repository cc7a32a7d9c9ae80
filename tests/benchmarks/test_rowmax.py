"""What rowmax's estimate takes, apart from attention, for whole prompts and for new tokens behind cached ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import sparseprefill as sp

pytestmark = pytest.mark.gpu


COLUMNS, TILES = {"every": 8}, {"every": 2, "width": 128, "union": "group"}


@pytest.mark.parametrize(
    "settings", [COLUMNS, TILES, {**TILES, "every": 1}], ids=["columns", "tiles", "tiles, every row"]
)
@pytest.mark.parametrize(("new", "behind"), [(131072, 0), (32768, 0), (8192, 131072), (2048, 131072), (2048, 32768)])
def test_estimate(benchmark: BenchmarkFixture, new: int, behind: int, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = ((32, new), (8, new + behind), (8, new + behind))
    q, k, v = (torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16) for heads, length in sizes)
    call = sp.AttentionCall(q, k, v, q_offset=behind)
    estimator = sp.build("rowmax", **settings).estimator

    def estimate() -> None:
        estimator.kept(call)
        torch.cuda.synchronize()

    benchmark.pedantic(estimate, rounds=10, warmup_rounds=2)
