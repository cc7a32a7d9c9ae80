"""Triton kernels, one family a file. Importing this package does not import triton; its modules do."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sparseprefill.mask.recorded import RECORDING as RECORDING
from sparseprefill.mask.recorded import apart as apart

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WIDEST = 256
"""Largest head dimension of kernels that look at single query rows."""


def serve(x: Tensor) -> bool:
    """True if kernels may run on a tensor's device: CUDA, with Triton installed. Else plain PyTorch does the work."""
    return bool(x.is_cuda) and _installed()


def serve_device(device: torch.device) -> bool:
    """True if kernels serve tensors on a device."""
    return device.type == "cuda" and _installed()


def serve_rows(q: Tensor) -> bool:
    """True if kernels that look at single query rows, of q ``[B, Hq, Nq, D]``, may do so; in float64 they do not."""
    return serve(q) and q.element_size() < 8 and q.shape[-1] <= WIDEST


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
