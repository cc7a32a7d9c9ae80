"""The full mask at the longest prompts against cuDNN's dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.device import BOUNDS
from sparseprefill import AttentionCall, Plan, SparseMask, output_error
from sparseprefill.executors.dense import attend
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_full_mask_at_128k_equals_cudnn(dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": 131072, "kv_len": 131072, "head_dim": 128}
    call = AttentionCall(*tensors("random", device="cuda", dtype=dtype, **shape))
    result = TritonExecutor().execute(call, Plan(SparseMask.full(call)))
    dense = attend(call)
    assert dense is not None
    assert output_error(result.out, dense[0]) <= BOUNDS[dtype]
    assert float((result.lse - dense[1]).abs().max()) <= 1e-3
