"""The made-up prompt that a calibration runs on: heads of the characters that a layer of a trained model has."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.errors import ParameterError
from sparseprefill.testing.heads import head_tensors


@frozen(kw_only=True)
class HeadSizes:
    """The heads to measure. dtype: PyTorch's name, such as "bfloat16". Raises ParameterError for what cannot be."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ParameterError(f"heads is {self.heads}: pass a multiple of the {self.kv_heads} KV heads")


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
