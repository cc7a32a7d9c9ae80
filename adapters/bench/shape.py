"""The heads of a layer: what every bench and the calibration measure, whatever else they say of a call or a model."""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.errors import ParameterError
from sparseprefill.testing.heads import head_tensors
from sparseprefill.validate import whole

DTYPES = ("bfloat16", "float16", "float32")
"""Those of calls and models that are measured."""


@frozen(kw_only=True)
class HeadSizes:
    """Llama-3-8B's unless others are given. dtype: PyTorch's name. Raises ParameterError for what cannot be."""

    heads: int = field(default=32, validator=whole())
    kv_heads: int = field(default=8, validator=whole())
    head_dim: int = field(default=128, validator=whole())
    dtype: str = "bfloat16"

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ParameterError(f"heads is {self.heads}: pass a multiple of the {self.kv_heads} KV heads")

    def __str__(self) -> str:
        return f"{self.heads} / {self.kv_heads} heads, d {self.head_dim}, {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def bytes_per_token(self) -> int:
        """Of q, k, v and the output."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim * self.torch_dtype.itemsize

    def made_up(
        self, tokens: int, device: torch.device, seed: int = 0, *, strided: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[1, Hq, N, D]``, k and v ``[1, Hkv, N, D]`` of heads with the characters that a trained layer's have, the
        same for a seed. strided: token-major (`head_tensors`)."""
        return head_tensors(
            q_len=tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            strided=strided,
            device=device,
            dtype=self.torch_dtype,
            seed=seed,
        )
