"""The made-up prompt that a calibration runs on: heads of the characters that a layer of a trained model has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill.testing.heads import head_tensors

if TYPE_CHECKING:
    from .measure import HeadSizes


def prompt(heads: HeadSizes, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[1, heads, tokens, head_dim]``, k and v ``[1, kv_heads, tokens, head_dim]``, always the same."""
    return head_tensors(
        q_len=tokens,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        dtype=getattr(torch, heads.dtype),
        device=device,
    )
