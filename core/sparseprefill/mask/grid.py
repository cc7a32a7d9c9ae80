"""The arithmetic behind SparseMask: who reaches which tile, other grids, dense form, shades."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import evolve
from torch import Tensor

from sparseprefill.mask.lists import IndexLists

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.mask.mask import SparseMask

SHADED = 16  # query rows that stand for a cell of a picture


def span(geometry: Geometry, tile_q: int, tile_k: int) -> tuple[Tensor, Tensor]:
    """int64 [B, R] each: half-open range of key tiles that the rows of each query tile may see."""
    tiles = geometry.tiles(tile_q)
    last = torch.div((tiles + 1) * tile_q - 1, tile_k, rounding_mode="floor") + 1
    last = torch.where(tiles >= 0, last, 0).clamp(max=geometry.tile_columns(tile_k))
    if geometry.window is None:
        return torch.zeros_like(last), last
    first = torch.div(tiles * tile_q - geometry.window + 1, tile_k, rounding_mode="floor")
    return first.clamp(min=0), last


def full_lists(geometry: Geometry, tile_q: int, tile_k: int) -> IndexLists:
    """All tiles in reach; every row's list is a run of one shared `arange`."""
    first, last = span(geometry, tile_q, tile_k)
    columns = geometry.tile_columns(tile_k)
    indices = torch.arange(columns, dtype=torch.int32, device=geometry.device)
    shape = (-1, geometry.heads, -1)
    counts = (last - first).clamp(min=0).to(torch.int32)[:, None].expand(shape).contiguous()
    return IndexLists(counts, first[:, None].expand(shape).contiguous(), indices, same_heads=True)


def reachable_map(geometry: Geometry, tile_q: int, tile_k: int) -> Tensor:
    """bool [B, R, C]: tiles that hold at least one allowed pair."""
    first, last = span(geometry, tile_q, tile_k)
    column = torch.arange(geometry.tile_columns(tile_k), device=geometry.device)
    return (column >= first[..., None]) & (column < last[..., None])


def diagonal_map(geometry: Geometry, tile_q: int, tile_k: int) -> Tensor:
    """bool [B, R, C]: key tiles that hold a row's own position."""
    tiles = geometry.tiles(tile_q)
    column = torch.arange(geometry.tile_columns(tile_k), device=geometry.device)
    first = torch.div(tiles * tile_q, tile_k, rounding_mode="floor")[..., None]
    last = torch.div((tiles + 1) * tile_q - 1, tile_k, rounding_mode="floor")[..., None]
    return (column >= first) & (column <= last)


def regrid(geometry: Geometry, keep: Tensor, old: int, new: int) -> Tensor:
    """Rows of a map ``[B, H, R, C]`` on tiles of `old` tokens, repeated on the finer grid of `new` tokens."""
    if old == new:
        return keep
    row = torch.div(geometry.tiles(new) * new, old, rounding_mode="floor") - geometry.first_tile(old)[:, None]
    row = row.clamp(0, keep.shape[2] - 1)
    index = row[:, None, :, None].expand(-1, keep.shape[1], -1, keep.shape[3])
    return torch.gather(keep, 2, index)


def dense(mask: SparseMask, rows: Tensor | None) -> Tensor:
    """bool [B, Hq, n, Nkv]."""
    geometry = mask.geometry
    query, key = geometry.query_positions(), geometry.key_positions()
    if rows is not None:
        query = query[:, rows]
    chosen = torch.zeros(
        geometry.batch, geometry.heads, query.shape[1], geometry.kv_len, dtype=torch.bool, device=geometry.device
    )
    if mask.has_tiles:
        column = torch.div(key, mask.tile_k, rounding_mode="floor")
        chosen |= _lookup(mask.tile_map(), _local(geometry, query, mask.tile_q), column)
    if mask.stripes is not None:
        chosen |= _lookup(mask.stripe_map(), _local(geometry, query, mask.group_rows), key)
    return chosen & geometry.visible(rows)[:, None]


def _local(geometry: Geometry, query: Tensor, tile: int) -> Tensor:
    return torch.div(query, tile, rounding_mode="floor") - geometry.first_tile(tile)[:, None]


def _lookup(keep: Tensor, row: Tensor, column: Tensor) -> Tensor:
    heads = keep.shape[1]
    row = row[:, None, :, None].expand(-1, heads, -1, keep.shape[3])
    picked = torch.gather(keep, 2, row)
    column = column.clamp(0, keep.shape[3] - 1)[:, None, None].expand(-1, heads, row.shape[2], -1)
    return torch.gather(picked, 3, column)


def row_chunks(geometry: Geometry, step: int, pairs: int = 1 << 24) -> Sequence[Tensor]:
    """Every `step`-th query row, in chunks of about `pairs` (query, key) pairs over batch and heads."""
    size = max(1, pairs // (geometry.batch * geometry.heads * geometry.kv_len))
    chunks: Sequence[Tensor] = torch.arange(0, geometry.q_len, step, device=geometry.device).split(size)
    return chunks


def head(mask: SparseMask, batch: int, head: int) -> SparseMask:
    """One head's mask, batch 1."""
    one = slice(batch, batch + 1)
    g = mask.geometry
    geometry = evolve(
        g,
        batch=1,
        heads=1,
        starts=None if g.starts is None else g.starts[one],
        lengths=None if g.lengths is None else g.lengths[one],
    )
    tiles = None if mask.tiles is None else mask.tiles.narrow(batch, head)
    stripes = None if mask.stripes is None else mask.stripes.narrow(batch, head)
    return evolve(mask, geometry=geometry, tiles=tiles, stripes=stripes)


def shade(mask: SparseMask, cells: int) -> Tensor:
    """float32 [B, Hq, cells, cells]."""
    g = mask.geometry
    device = g.device
    chosen = torch.zeros(g.batch, g.heads, cells, cells, device=device)
    allowed = torch.zeros(g.batch, 1, cells, cells, device=device)
    column = torch.arange(g.kv_len, device=device) * cells // g.kv_len
    for rows in row_chunks(g, max(1, g.q_len // (cells * SHADED))):
        row = rows * cells // g.q_len
        for total, keep in ((chosen, mask.to_dense(rows)), (allowed, g.visible(rows)[:, None])):
            by_column = torch.zeros(*keep.shape[:3], cells, device=device)
            by_column.index_add_(3, column, keep.float())
            total.index_add_(2, row, by_column)
    return torch.where(allowed > 0, chosen / allowed, torch.nan)
