"""Queries and keys in groups of `stride` tokens on each row's own token grid, zeros where there is no token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


def key_groups(call: AttentionCall, length: int, stride: int) -> Tensor:
    """Keys at positions 0 to `length`, each group in reverse order: ``[B, Hkv, length / stride, stride, D]``.

    Against queries in their order, one product over ``stride * D`` then sums an antidiagonal.
    """
    geometry, k = call.geometry, call.k
    if geometry.starts is None and geometry.lengths is None:
        placed = functional.pad(k, [0, 0, 0, length - k.shape[2]])
    else:
        position = torch.arange(length, device=k.device).expand(geometry.batch, -1)
        real = position < geometry.key_counts()[:, None]
        index = position if geometry.starts is None else position + geometry.starts[:, None]
        placed = _pick(k, index, real)
    grouped: Tensor = placed.unflatten(2, (-1, stride))
    return grouped.flip(3)


def query_tiles(call: AttentionCall, first: int, last: int, block: int) -> tuple[Tensor, Tensor]:
    """Query tiles `first` to `last` of the call: ``[B, Hq, n, D]`` with n tokens, and bool ``[B, n]``, which exist."""
    geometry, q = call.geometry, call.q
    if geometry.starts is None and geometry.lengths is None:
        begin = (geometry.q_offset // block + first) * block - geometry.q_offset
        end = begin + (last - first) * block
        front, back = max(0, -begin), max(0, end - geometry.q_len)
        rows = q[:, :, begin + front : end - back]
        real = torch.ones(1, rows.shape[2], dtype=torch.bool, device=q.device).expand(geometry.batch, -1)
        if not front and not back:
            return rows, real
        return functional.pad(rows, [0, 0, front, back]), functional.pad(real, [front, back])
    begins = (geometry.first_tile(block) + first) * block
    index, real = geometry.locate(begins[:, None] + torch.arange((last - first) * block, device=q.device))
    return _pick(q, index, real), real


def _pick(x: Tensor, index: Tensor, real: Tensor) -> Tensor:
    where = index.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return torch.where(real[:, None, :, None], torch.gather(x, 2, where), 0)
