"""The contract checks for kernels, by the portable one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.device import DEVICE
from sparseprefill import AttentionCall
from sparseprefill.testing import check_kernel, tensors
from sparseprefill.testing.kernels import LAWS

# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_the_portable_kernel_keeps_every_law() -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 140, "kv_len": 230, "head_dim": 64}
    call = AttentionCall(*tensors("stripes", device=DEVICE, dtype=torch.float16, **sizes))
    report = check_kernel("portable", calls=[call])
    assert set(report.cases) == {*LAWS} - {"rounding is told"}
    assert report.skipped == {"rounding is told": "its precision is the call's"}
