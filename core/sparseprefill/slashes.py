"""Columns and diagonals as masks: the vertical-slash pattern, which several papers build on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


def slash_tiles(geometry: Geometry, slashes: Tensor, block: int) -> Tensor:
    """bool ``[B, H, R, C]``: tiles on the diagonals of bins ``[B, H, S]``, and the diagonal tiles.

    A bin s holds distances ``[s * block, (s + 1) * block)``, whose pairs fall in the tile diagonals s and s + 1.
    """
    column = torch.arange(geometry.tile_columns(block), device=geometry.device)
    lag = geometry.tiles(block)[..., None] - column
    keep = torch.zeros(*slashes.shape[:2], slashes.shape[2] + 2, dtype=torch.bool, device=slashes.device)
    keep[..., 0], keep[..., 1:-1] = True, slashes
    keep[..., 2:] |= slashes
    where = torch.where((lag >= 0) & (lag <= slashes.shape[2]), lag + 1, 0)[:, None]
    at = where.expand(-1, slashes.shape[1], -1, -1).flatten(2)
    return torch.gather(keep, 2, at).view(*slashes.shape[:2], *lag.shape[1:]) & (lag >= 0)[:, None]
