"""Columns and diagonals as masks: the vertical-slash pattern, which several papers build on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.statistics.sampled import last_rows, sampled_mass
from sparseprefill.statistics.select import top_mass

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.geometry import Geometry


def vertical_slash(call: AttentionCall, gamma: float, block: int) -> SparseMask:
    """Columns (as stripes) and diagonals (as tiles) that each carry `gamma` of the last block's attention.

    SharePrefill, Algorithm 5, with the last `block` real queries of each row as the sample. The diagonal tile is kept.
    """
    geometry = call.geometry
    rows, real = last_rows(call, block)
    mass = sampled_mass(call, rows, real, block)
    columns, slashes = top_mass(mass.columns, gamma), top_mass(mass.slashes, gamma)
    return columns_and_diagonals(call, slash_tiles(geometry, slashes, block), columns, block)


def columns_and_diagonals(
    call: AttentionCall, tiles: Tensor, columns: Tensor, block: int, *, exclude: Tensor | None = None, sink: int = 0
) -> SparseMask:
    """Tiles, bool ``[B, H, R, C]``, with the diagonal ones, and key columns, bool ``[B, H, Nkv]``, for all their rows.

    exclude: bool ``[B, H]``, heads whose columns do not count. sink: so many first tiles are kept too. Columns are
    positions on the row's grid. The map of tiles is read when the mask is used: nobody may write to it after this.
    """
    geometry = call.geometry
    group = geometry.tile_columns(block)
    groups = geometry.tile_rows(group * block)
    stripes = IndexLists.from_map(columns[:, :, None].expand(-1, -1, groups, -1))
    if exclude is not None:
        stripes.counts.masked_fill_(exclude[..., None], 0)
    chosen = TileMap(geometry=geometry, tile_q=block, tile_k=block, keep=tiles, band=0, sink=sink)
    return SparseMask(geometry, block, block, chosen, group, stripes)


def slash_tiles(
    geometry: Geometry,
    slashes: Tensor,
    block: int,
    part: Tensor | None = None,
    columns: Tensor | None = None,
    *,
    exclude: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """bool ``[B, H, R, C]``: tiles on the diagonals of bins ``[B, H, S]``, and the diagonal tiles; none of the future.

    A bin s holds distances ``[s * block, (s + 1) * block)``, whose pairs fall in the tile diagonals s and s + 1.
    part: int64 ``[B, R]``, for bins ``[B, H, P, S]``: which of the P sets governs each query tile. columns: bool
    ``[B, H, C]``, or ``[B, H, P, C]`` with a part: tiles of these key columns too. exclude: bool ``[B, H]`` and
    ``[B, H, R, C]``, heads that have the tiles of this other map, which may be written to.
    """
    if part is None:
        slashes, columns = slashes[:, :, None], None if columns is None else columns[:, :, None]
    if kernels.serve(slashes):
        from sparseprefill.kernels.sampled.diagonals import diagonal_tiles

        return diagonal_tiles(geometry, slashes, block, part, columns, *(exclude or ()))
    part = torch.zeros_like(geometry.tiles(block)) if part is None else part
    heads, bins = slashes.shape[1], slashes.shape[3]
    lags = functional.pad(slashes, (0, 1)) | functional.pad(slashes, (1, 0))
    lags[..., 0] = True
    lag = geometry.tiles(block)[..., None] - torch.arange(geometry.tile_columns(block), device=geometry.device)
    at = part[..., None] * (bins + 1) + lag.clamp(0, bins)
    picked: Tensor = torch.gather(lags.flatten(2), 2, at.flatten(1)[:, None].expand(-1, heads, -1))
    keep = picked.unflatten(2, lag.shape[1:]) & (lag <= bins)[:, None]
    if columns is not None:
        keep = keep | torch.gather(columns, 2, part[:, None, :, None].expand(-1, heads, -1, columns.shape[3]))
    past: Tensor = keep & (lag >= 0)[:, None]
    return past if exclude is None else torch.where(exclude[0][..., None, None], exclude[1], past)
