"""Where kernel tests run: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import torch

from sparseprefill.kernels.family import chips as gpu

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(BOUNDS) if CUDA else [torch.float32, torch.float16]
HEAD_DIMS = (64, 80, 96, 128, 256) if CUDA else (64, 80)
HOPPER = CUDA and gpu.capability(torch.device("cuda")) == (9, 0)
TMA = (False, True) if not CUDA or gpu.chip(torch.device("cuda")).large else (False,)
