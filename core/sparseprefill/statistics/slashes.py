"""Columns and diagonals as masks: the vertical-slash pattern, which several papers build on."""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels
from sparseprefill.call import AttentionCall
from sparseprefill.mask.geometry import Geometry, by_block
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import Priority, PriorityScores
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.plan import Plan
from sparseprefill.statistics.sampled import SampledMass, last_mass
from sparseprefill.statistics.select import top_mass

EVERY = 1 << 20
"""Query tiles that share a list of columns: more than any prompt has. One number for prompts of all lengths: kernels
are compiled for it."""


def vertical_slash(call: AttentionCall, gamma: float, block: int) -> Plan:
    """Columns (as stripes) and diagonals (as tiles) that each carry `gamma` of the last block's attention.

    SharePrefill, Algorithm 5, with the last `block` real queries of each row as the sample. The diagonal tile is kept.
    """
    geometry = call.geometry
    mass, _, real = last_mass(call, block)
    columns, slashes = top_mass(mass.columns, gamma), top_mass(mass.slashes, gamma)
    mask = columns_and_diagonals(call, slash_tiles(geometry, slashes, block), columns, block)
    return Plan(mask, priority=SampledPriority(mass, real, block))


@frozen(eq=False)
class SampledPriority(Priority):
    """Worth of all pairs by sampled rows: a key is worth its share of their attention, a tile that of its diagonals.

    mass, real: what was sampled, and bool ``[B, n]``, which rows there are; ``[B, S, n]`` for several samples. block:
    tokens of a diagonal bin. column: tokens of a column bin. part: int64 ``[B, R]``, which of the samples speaks for
    each query tile of `block` tokens, or None for the highest score of all. by_column: bool ``[B, Hq]``, or True for
    all: heads that have tiles for their columns, so that a tile is worth what these are if that is more.
    """

    mass: SampledMass
    real: Tensor
    block: int
    column: int = field(default=1, kw_only=True)
    part: Tensor | None = field(default=None, kw_only=True)
    by_column: Tensor | bool = field(default=False, kw_only=True)

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """See `Priority`: the mean share of the two diagonal bins that a tile lies in."""
        return PriorityScores(tiles=self._tiles, tile_q=self.block, tile_k=self.block).tile_scores(call, tile_q, tile_k)

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """See `Priority`: the same for all queries, or those of a part."""
        columns = self._by_part(self._shares(self.mass.columns), call, position)[:, heads]
        wide = columns.repeat_interleave(self.column, dim=-1) / self.column
        return wide[..., : call.kv_len].expand(-1, -1, position.shape[1], -1)

    def _shares(self, mass: Tensor) -> Tensor:
        """``[B, Hq, S, *]``: mass by the number of rows that were sampled."""
        count = self.real.sum(-1).clamp(min=1)
        return mass[:, :, None] / count[:, None, None, None] if mass.dim() == 3 else mass / count[:, None, :, None]

    def _by_part(self, x: Tensor, call: AttentionCall, position: Tensor) -> Tensor:
        """``[B, Hq, n or 1, *]`` of x ``[B, Hq, S, *]``: the sample that speaks for each position."""
        if x.shape[2] == 1 or self.part is None:
            return x.amax(2, keepdim=True)
        part = torch.gather(self.part, 1, call.geometry.tile_at(position, self.block))[:, None, :, None]
        return torch.take_along_dim(x, part, 2)

    def _tiles(self, call: AttentionCall) -> Tensor:
        geometry, block = call.geometry, self.block
        position = geometry.tiles(block) * block
        bins = self._shares(self.mass.slashes)
        lags = self._by_part((functional.pad(bins, (0, 1)) + functional.pad(bins, (1, 0))) / 2, call, position)
        lag = geometry.tiles(block)[..., None] - torch.arange(geometry.tile_columns(block), device=geometry.device)
        tiles = torch.take_along_dim(lags, lag.clamp(0, bins.shape[3])[:, None], 3)
        if self.by_column is False:
            return tiles
        columns = self._by_part(self._shares(self.mass.columns), call, position)
        if self.column == 1:
            columns = by_block(columns, block)
        either = torch.maximum(tiles, columns)
        return either if self.by_column is True else torch.where(self.by_column[..., None, None], either, tiles)


def columns_and_diagonals(
    call: AttentionCall, tiles: Tensor, columns: Tensor, block: int, *, exclude: Tensor | None = None, sink: int = 0
) -> SparseMask:
    """Tiles, bool ``[B, H, R, C]``, with the diagonal ones, and key columns, bool ``[B, H, Nkv]``, for all their rows.

    exclude: bool ``[B, H]``, heads whose columns do not count. sink: so many first tiles are kept too. Columns are
    positions on the row's grid. The map of tiles is read when the mask is used: nobody may write to it after this.
    """
    geometry = call.geometry
    groups = geometry.tile_rows(EVERY * block)
    stripes = IndexLists.from_map(columns[:, :, None].expand(-1, -1, groups, -1))
    if exclude is not None:
        stripes.counts.masked_fill_(exclude[..., None], 0)
    chosen = TileMap(geometry=geometry, tile_q=block, tile_k=block, keep=tiles, band=0, sink=sink)
    return SparseMask(geometry, block, block, chosen, EVERY, stripes)


def sinks_and_near(
    geometry: Geometry, tile_q: int, tile_k: int, sinks: Tensor | int, near: Tensor, width: int
) -> IndexLists:
    """The first `sinks` key tiles of each query tile, and those from `near` on up to its own; the same for all heads.

    sinks: int64 ``[B, R]``, or a number for all. near: int64 ``[B, R]``. width: the longest list, known on the host.
    """
    tile, columns = geometry.tiles(tile_q), geometry.tile_columns(tile_k)
    behind = torch.where(tile >= 0, (tile + 1) * tile_q // tile_k, 0).clamp(max=columns)
    begin = behind.clamp(max=sinks)
    first = torch.stack([torch.zeros_like(begin), torch.maximum(near, begin)], -1)
    last = torch.stack([begin, behind], -1)
    return IndexLists.from_ranges(first, last, geometry.heads, min(width, columns))


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
    bins = slashes.shape[3]
    lags = functional.pad(slashes, (0, 1)) | functional.pad(slashes, (1, 0))
    lags[..., 0] = True
    lag = geometry.tiles(block)[..., None] - torch.arange(geometry.tile_columns(block), device=geometry.device)
    at = part[..., None] * (bins + 1) + lag.clamp(0, bins)
    picked = torch.take_along_dim(lags.flatten(2), at.flatten(1)[:, None], 2)
    keep = picked.unflatten(2, lag.shape[1:]) & (lag <= bins)[:, None]
    if columns is not None:
        keep = keep | torch.take_along_dim(columns, part[:, None, :, None], 2)
    past: Tensor = keep & (lag >= 0)[:, None]
    return past if exclude is None else torch.where(exclude[0][..., None, None], exclude[1], past)
