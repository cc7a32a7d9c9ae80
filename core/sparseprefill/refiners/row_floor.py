"""What a floor adds that looks at a share of all query rows: each query tile by its own rows, some tiles at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import rows_at
from sparseprefill.mask.samples import Held, stripes_at
from sparseprefill.statistics.by_tile import row_mass

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.geometry import Geometry

ENTRIES, ENTRIES_ON_CPU = 1 << 24, 1 << 20
"""Masses of rows by key tile that are in memory at once, over batch and heads."""
EACH = 48
"""Bytes that one of them takes: its sums and masses, those of the mask, what is lost, and what is on its way."""
HALVINGS = 16
"""Halvings of the interval that holds the smallest added mass of a row; its logarithm is then known to 2^-11."""
SMALLEST = 2.0**-24
"""Share of a row's largest lost mass below which its lost masses are taken all or none."""
LEVELS = 24
"""How often the interval is halved that holds the level to which a head's rows are raised."""


@frozen(eq=False)
class SampledRows:
    """One row in `stride` of each query tile, from row ``tile % stride`` of it on; at the end, the last row of all.

    index: int64 ``[B, n]`` among the call's queries. position: int64 of the same shape, on the row's grid. real: bool,
    which of them are tokens of the call. own: int64, which of the call's query tiles holds it.
    """

    index: Tensor
    position: Tensor
    real: Tensor
    own: Tensor


class Raised(NamedTuple):
    """What a floor adds to a plan.

    added: bool ``[B, Hq, R, C]``, tiles that the plan gets. before, after: ``[B, Hq, n]``, mass that sampled rows kept
    of theirs, and keep now. dense: bool ``[B, Hq, P]``, spans of heads that get every tile; None for none.
    """

    added: Tensor
    before: Tensor
    after: Tensor
    dense: Tensor | None = None


def stride_of(share: float, tile: int) -> int:
    """A query tile's rows to look at are one in so many, at least one of each tile."""
    return min(max(round(1 / share), 1), tile)


def sampled(geometry: Geometry, tile: int, share: float, tiles: slice = slice(None)) -> SampledRows:
    """The rows that are sampled of some of the call's query tiles."""
    stride = stride_of(share, tile)
    number = geometry.tiles(tile)[:, tiles]  # [B, R]
    first = geometry.first_position()[:, None, None]
    behind = torch.minimum(first + geometry.q_len, geometry.key_counts()[:, None, None])
    begin = number[..., None] * tile
    offset = torch.arange(0, tile, stride, device=number.device)
    position = begin + number[..., None] % stride + offset  # [B, R, rows]
    # Of the tile in which the queries end, the last sampled row gives way to their last row.
    ends = (behind > begin) & (behind <= begin + tile) & (position + stride >= behind)
    ends = ends & ((offset == 0) | (position < behind))
    position = torch.where(ends, behind - 1, position)
    real = (position >= first.clamp(min=0)) & (position < torch.minimum(behind, begin + tile))
    own = torch.arange(number.shape[1], device=number.device)[:, None].expand_as(position)
    index = (position - first).clamp(0, geometry.q_len - 1)
    return SampledRows(*(x.flatten(1) for x in (index, position, real, own)))


def workspace(call: AttentionCall, share: float) -> int:
    """Bytes: masses of some rows by key tile at a time, and of each row what it keeps."""
    geometry, tile = call.geometry, 128
    pairs, rows = geometry.batch * geometry.heads, -(-tile // stride_of(share, tile))
    at_once = max(_entries(call), pairs * rows * geometry.tile_columns(tile))
    return EACH * at_once + 16 * pairs * rows * geometry.tile_rows(tile)


def raised(
    call: AttentionCall, held: Held, reach: Tensor, share: float, each_row: float, target: float
) -> tuple[SampledRows, Raised]:
    """Tiles by which each sampled row keeps `each_row` of its mass, and those of a head together `target` on average.

    For the average, the rows that keep least come first: all are raised to one level, the lowest that will do. Of what
    a row lacks it gets the largest, down to one mass, those of which differ by less than a thousandth together.
    """
    geometry = call.geometry
    every = sampled(geometry, held.grid[0], share)
    level = torch.full((), each_row, device=call.q.device).expand(geometry.batch, geometry.heads)
    if target > each_row:
        before = torch.cat([kept for _, _, _, kept in _masses(call, held, reach, share)], -1)
        level = _level(before, every.real[:, None], each_row, target)
    added, befores, afters = [], [], []
    for tiles, rows, lost, before in _masses(call, held, reach, share):
        need = torch.where(rows.real[:, None], level[..., None] - before, 0.0)[..., None]
        chosen = (lost >= _smallest(lost, need)) & (lost > 0) & (need > 0)
        count = rows.own.shape[1] // held.map[:, :, tiles].shape[2]
        some = chosen.unflatten(2, (-1, count)).any(3) & reach[:, :, tiles] & ~held.map[:, :, tiles]
        added.append(some)
        befores.append(before)
        afters.append(before + (lost * rows_at(some, rows.own)).sum(-1))
    return every, Raised(torch.cat(added, 2), torch.cat(befores, -1), torch.cat(afters, -1))


def _masses(
    call: AttentionCall, held: Held, reach: Tensor, share: float
) -> Iterator[tuple[slice, SampledRows, Tensor, Tensor]]:
    """Query tiles, their sampled rows, mass that these lose by key tile ``[B, Hq, n, C]``, and keep ``[B, Hq, n]``."""
    geometry, (tile_q, tile_k) = call.geometry, held.grid
    number, columns = geometry.tile_rows(tile_q), geometry.tile_columns(tile_k)
    each = -(-tile_q // stride_of(share, tile_q)) * geometry.batch * geometry.heads * columns
    size = max(1, _entries(call) // each)
    for first in range(0, number, size):
        tiles = slice(first, min(first + size, number))
        rows = sampled(geometry, tile_q, share, tiles)
        keys = stripes_at(held.masks, rows.position, columns * tile_k)
        mass = row_mass(call, rows.index, rows.real, tile_k, keys)
        own = rows_at((held.map & reach)[:, :, tiles], rows.own)
        lost = torch.where(own, 0.0, mass.tiles - mass.kept).nan_to_num(nan=0.0).clamp(min=0.0)
        yield tiles, rows, lost, torch.where(own, mass.tiles, mass.kept).sum(-1)


def _smallest(lost: Tensor, need: Tensor) -> Tensor:
    """``[B, Hq, n, 1]``: a mass, such that what a row loses in tiles of no smaller one is no less than it needs."""
    high = lost.amax(-1, keepdim=True).log2()  # of these alone it may be too little
    low = high + math.log2(SMALLEST)
    all_ = torch.where(lost >= low.exp2(), lost, 0.0).sum(-1, keepdim=True) < need
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = torch.where(lost >= middle.exp2(), lost, 0.0).sum(-1, keepdim=True) >= need
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.exp2() * ~all_


def _level(before: Tensor, real: Tensor, least: float, target: float) -> Tensor:
    """``[B, Hq]``: the lowest level from `least` to 1 to which rows must be raised for their mean to be the target."""
    low = torch.full(before.shape[:2], least, dtype=before.dtype, device=before.device)
    high = torch.ones_like(low)
    count = real.sum(-1).clamp(min=1)
    known = torch.where(real, before.nan_to_num(nan=1.0), 0.0)
    for _ in range(LEVELS):
        middle = (low + high) / 2
        mean = torch.where(real, torch.maximum(known, middle[..., None]), 0.0).sum(-1) / count
        low, high = torch.where(mean >= target, low, middle), torch.where(mean >= target, middle, high)
    return high


def _entries(call: AttentionCall) -> int:
    return ENTRIES_ON_CPU if call.q.device.type == "cpu" else ENTRIES
