"""Several requests in one launch of the kernel of capability 9.0: the very bits of one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from helpers.launches import noted_launches
from kernels.caches import LAYOUTS, untouched
from kernels.device import HOPPER
from kernels.requests import mask_of, step_of
from kernels.test_hopper import HALVES
from sparseprefill import Plan
from sparseprefill.executors.triton import TritonExecutor

pytest.importorskip("sparseprefill.kernels.hopper.launch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of capability 9.0")]
TRITON = TritonExecutor()
STEPS = (
    [(1, 1), (127, 127), (128, 900), (129, 129)],
    [(257, 1021), (1500, 1500)],
    [(300, 5000), (700, 3001), (64, 2048), (1000, 1000), (129, 4999)],
    [(17, 17)] * 8,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_bits_of_one_by_one(
    dtype: torch.dtype, width: int, page: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = noted_launches(monkeypatch)
    for number, sizes in enumerate(STEPS):
        of: dict[str, Any] = {"heads": (8, 4, 8, 2)[number], "kv_heads": 2, "width": width, "page": page}
        garbage = (math.nan, 3.0)[number % 2]  # behind the last key: what is not finite has blocks repaired
        calls = step_of(
            sizes, dtype=dtype, layout=layout, device="cuda", gap=number % 2, seed=number, garbage=garbage, **of
        )
        tile = ((128, 128), (128, 64), (256, 128))[number % 3]
        for kind in ("full", "tiles", "stripes", "both", "wide"):
            plans = [Plan(mask_of(call, kind, tile, seed=seed)) for seed, call in enumerate(calls)]
            launches.clear()
            together = TRITON.execute_many(calls, plans)
            assert launches == [len(calls)]
            for call, plan, one in zip(calls, plans, together, strict=True):
                alone = TRITON.execute(call, plan)
                assert [kernel.name for kernel in one.kernels] == ["hopper"]
                assert one.kernels == alone.kernels
                assert torch.equal(alone.out, one.out)
                assert torch.equal(alone.lse, one.lse)
                assert untouched(call)


@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    """The second time, when all is compiled and kept."""
    calls = step_of(STEPS[2], heads=8, kv_heads=2, width=128, dtype=torch.bfloat16, device="cuda")
    for mode in ("default", "error"):
        plans = [Plan(mask_of(call, "both", (128, 128), seed=3)) for call in calls]
        [plan.mask.tiles for plan in plans]
        torch.cuda.set_sync_debug_mode(mode)
        try:
            TRITON.execute_many(calls, plans)
        finally:
            torch.cuda.set_sync_debug_mode("default")
