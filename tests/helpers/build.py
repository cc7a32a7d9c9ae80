"""Small calls for the unit tests."""

from __future__ import annotations

from typing import Any

import torch

from sparseprefill.call import AttentionCall
from sparseprefill.testing import tensors


def make(
    q_len: int = 40, kv_len: int | None = None, *, batch: int = 1, heads: int = 2, kv_heads: int = 1, **fields: Any
) -> AttentionCall:
    """An AttentionCall with head dimension 8; `fields` are its keyword fields, or `kind`, `seed`, `dtype`."""
    kinds = {"kind": "random", "seed": 0, "dtype": torch.float32}
    kind, seed, dtype = (fields.pop(name, default) for name, default in kinds.items())
    q, k, v = tensors(
        kind,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=q_len if kv_len is None else kv_len,
        head_dim=8,
        seed=seed,
        dtype=dtype,
    )
    return AttentionCall(q, k, v, **fields)


def int32(*values: int) -> torch.Tensor:
    """Starts or lengths of batch rows."""
    return torch.tensor(values, dtype=torch.int32)
