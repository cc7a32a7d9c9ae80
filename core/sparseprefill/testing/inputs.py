"""Query, key and value tensors with the structures that attention of trained models shows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseprefill.testing.rotary import FLOATS, HOST

KINDS = ("random", "sink", "local", "stripes")


def tensors(
    kind: str,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    q_offset: int | None = None,
    strength: float = 6.0,
    seed: int = 0,
    strided: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[B, Hq, Nq, D]``, k ``[B, Hkv, Nkv, D]`` and v ``[B, Hkv, Nkv, D]``, the same for a seed on every device.

    kind: "random", or logits that stand out by about `strength` at the first keys ("sink"), near the diagonal
    ("local"), or at scattered columns ("stripes"). `head_tensors` has heads of several characters. strided: token-major
    storage, as projections of a model give it.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: pass one of {', '.join(KINDS)}")
    source = torch.Generator("cpu").manual_seed(seed)
    q = torch.randn(batch, heads, q_len, head_dim, generator=source, **FLOATS)
    k = torch.randn(batch, kv_heads, kv_len, head_dim, generator=source, **FLOATS)
    v = torch.randn(batch, kv_heads, kv_len, head_dim, generator=source, **FLOATS)
    # The planted direction is one unit vector; `reach` makes scale * q.k rise by `strength` where both carry it.
    reach = math.sqrt(strength * math.sqrt(head_dim))
    unit = torch.full((head_dim,), 1 / math.sqrt(head_dim), **FLOATS)
    if kind == "sink":
        q, k[:, :, :4] = q + reach * unit, k[:, :, :4] + reach * unit
    elif kind == "stripes":
        column = torch.rand(batch, kv_heads, kv_len, generator=source, **FLOATS) < 0.05
        q, k = q + reach * unit, k + reach * unit * column[..., None]
    elif kind == "local" and head_dim >= 2:
        first = kv_len - q_len if q_offset is None else q_offset
        q[..., :2] = reach * _angle(torch.arange(q_len, device=HOST) + first)
        k[..., :2] = reach * _angle(torch.arange(kv_len, device=HOST))
    return tuple(_place(x, strided, device, dtype) for x in (q, k, v))  # type: ignore[return-value]


def _angle(position: Tensor, period: float = 1000.0) -> Tensor:
    """Neighbours point the same way, as under a slow rotary frequency."""
    phase = position.to(torch.float32) * (2 * math.pi / period)
    return torch.stack([torch.cos(phase), torch.sin(phase)], -1)


def _place(x: Tensor, strided: bool, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    x = x.to(device=device, dtype=dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if strided else x
