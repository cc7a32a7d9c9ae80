"""Columns and diagonals as masks: the vertical-slash pattern, which several papers build on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sparseprefill.lists import IndexLists
from sparseprefill.mask import SparseMask
from sparseprefill.sampling import last_rows, sampled_mass
from sparseprefill.selection import top_mass

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.geometry import Geometry


def vertical_slash(call: AttentionCall, gamma: float, block: int) -> SparseMask:
    """Columns (as stripes) and diagonals (as tiles) that each carry `gamma` of the last block's attention.

    SharePrefill, Algorithm 5, with the last `block` real queries of each row as the sample. The diagonal tile is kept.
    """
    geometry = call.geometry
    rows, real = last_rows(call, block)
    mass = sampled_mass(call, rows, real, block)
    columns, slashes = top_mass(mass.columns, gamma), top_mass(mass.slashes, gamma)
    group = geometry.tile_columns(block)
    groups = geometry.tile_rows(group * block)
    stripes = IndexLists.from_map(columns[:, :, None].expand(-1, -1, groups, -1))
    tiles = SparseMask.from_tiles(call, slash_tiles(geometry, slashes, block), block)
    return SparseMask(geometry, block, block, tiles.tiles, group, stripes)


def slash_tiles(geometry: Geometry, slashes: Tensor, block: int, part: Tensor | None = None) -> Tensor:
    """bool ``[B, H, R, C]``: tiles on the diagonals of bins ``[B, H, S]``, and the diagonal tiles.

    A bin s holds distances ``[s * block, (s + 1) * block)``, whose pairs fall in the tile diagonals s and s + 1.
    part: int64 ``[B, R]``, for bins ``[B, H, P, S]``: which of the P sets governs each query tile.
    """
    if part is None:
        slashes, part = slashes[:, :, None], torch.zeros_like(geometry.tiles(block))
    heads, bins = slashes.shape[1], slashes.shape[3]
    lags = functional.pad(slashes, (0, 1)) | functional.pad(slashes, (1, 0))
    lags[..., 0] = True
    lag = geometry.tiles(block)[..., None] - torch.arange(geometry.tile_columns(block), device=geometry.device)
    at = part[..., None] * (bins + 1) + lag.clamp(0, bins)
    picked: Tensor = torch.gather(lags.flatten(2), 2, at.flatten(1)[:, None].expand(-1, heads, -1))
    keep: Tensor = picked.unflatten(2, lag.shape[1:]) & ((lag >= 0) & (lag <= bins))[:, None]
    return keep
