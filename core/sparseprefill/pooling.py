"""Means over query tiles on each row's own token grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from sparseprefill.geometry import Geometry


def tile_mean(x: Tensor, geometry: Geometry, tile: int) -> Tensor:
    """Mean of x ``[B, H, Nq, *]`` over the real rows of each query tile: ``[B, H, R, *]``, float32 or better.

    Rows of padding count for nothing, whatever they hold; a tile without a real row gives 0.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = geometry.tile_rows(tile)
    if geometry.starts is None and geometry.lengths is None:
        front = geometry.q_offset % tile
        back = rows * tile - front - geometry.q_len
        if front or back:
            x = functional.pad(x, [0, 0] * (x.dim() - 3) + [front, back])
        total: Tensor = x.unflatten(2, (rows, tile)).sum(3, dtype=dtype)
        first = torch.arange(rows, device=x.device) * tile - front
        count = (first + tile).clamp(max=geometry.q_len) - first.clamp(min=0)
        return total / count.view(1, 1, rows, *[1] * (x.dim() - 3))
    return _ragged(x, geometry, tile, dtype)


def _ragged(x: Tensor, geometry: Geometry, tile: int, dtype: torch.dtype) -> Tensor:
    rows, tail = geometry.tile_rows(tile), x.dim() - 3
    first = geometry.first_tile(tile) * tile - geometry.first_position()
    index = first[:, None] + torch.arange(rows * tile, device=x.device)
    inside = (index >= 0) & (index < geometry.q_len)
    index = index.clamp(0, geometry.q_len - 1)
    real = inside & torch.gather(geometry.real_queries(), 1, index)
    where = index.view(geometry.batch, 1, -1, *[1] * tail).expand(-1, x.shape[1], -1, *x.shape[3:])
    keep = real.view(geometry.batch, 1, -1, *[1] * tail)
    picked = torch.where(keep, torch.gather(x, 2, where), 0)
    total: Tensor = picked.unflatten(2, (rows, tile)).sum(3, dtype=dtype)
    count: Tensor = real.unflatten(1, (rows, tile)).sum(2).clamp(min=1)
    return total / count.view(geometry.batch, 1, rows, *[1] * tail)
