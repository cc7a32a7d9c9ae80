"""Queries and keys by position on each batch row's token grid, zeros where there is no token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparseprefill.call import AttentionCall, rows_at, uncast

HIGHEST = 128
"""Rows of the largest tile of a kernel over token groups, and so groups of a block."""


def supported(call: AttentionCall, block: int, size: int) -> bool:
    """True if kernels over groups of `size` tokens take blocks of `block`: a power of two of groups, 1 to 64."""
    per = block // size
    return call.q.dtype != torch.float64 and per & (per - 1) == 0 and per <= HIGHEST // 2


def queries_on_grid(call: AttentionCall, tile: int, first: int, count: int) -> Tensor:
    """``[B, Hq, count * tile, D]``: `count` query tiles of the call, from its tile `first` on."""
    geometry = call.geometry
    if call.starts is None and call.lengths is None:
        return _cut(call.q, (geometry.q_offset // tile + first) * tile - geometry.q_offset, count * tile)
    start = (geometry.first_tile(tile) + first) * tile
    return _picked(call.q, *geometry.locate(start[:, None] + torch.arange(count * tile, device=call.q.device)))


def keys_on_grid(call: AttentionCall, tokens: int) -> Tensor:
    """``[B, Hkv, tokens, D]``: keys at the positions from 0 on; none after the call's last query."""
    geometry = call.geometry
    k = call.k[:, :, : geometry.q_offset + geometry.q_len]
    if call.starts is None and call.lengths is None:
        return _cut(k, 0, tokens)
    position = torch.arange(tokens, device=k.device).expand(geometry.batch, -1)
    index = position if geometry.starts is None else position + geometry.starts[:, None]
    _, _, behind = geometry.token_range()
    return _picked(k, index.clamp(max=k.shape[2] - 1), position < behind[:, None])


@uncast
def wide_products(q: Tensor, k: Tensor) -> Tensor:
    """``[B, Hq, n, m]``: q ``[B, Hq, n, D]`` times its KV head's k ``[B, Hkv, m, D]``, summed in float32 or better.

    On a GPU, tensor cores add in float32; a half-precision result would round the sums for nothing.
    """
    batch, heads, n, width = q.shape
    rows, columns = q.reshape(batch * k.shape[1], -1, width), k.flatten(0, 1).transpose(1, 2)
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        product = torch.bmm(rows, columns, out_dtype=torch.float32)
    else:
        dtype = torch.promote_types(q.dtype, torch.float32)
        product = torch.bmm(rows.to(dtype), columns.to(dtype))
    return product.view(batch, heads, n, -1)


def _cut(x: Tensor, first: int, tokens: int) -> Tensor:
    """Rows of x ``[B, H, N, C]`` from `first` on, where all of them are tokens."""
    some = x[:, :, max(first, 0) : first + tokens]
    front = max(-first, 0)
    back = tokens - front - some.shape[2]
    return functional.pad(some, (0, 0, front, back)) if front or back else some


def _picked(x: Tensor, index: Tensor, real: Tensor) -> Tensor:
    """Rows of x ``[B, H, N, C]`` by index ``[B, n]``, zeros where they are not real, bool ``[B, n]``."""
    return torch.where(real[:, None, :, None], rows_at(x, index), 0)
