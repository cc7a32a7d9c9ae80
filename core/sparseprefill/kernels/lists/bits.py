"""Device functions on maps of tiles: which key tiles of one query tile a map and its rules keep."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.steps import floor_div


@triton.jit
def _mix(x):
    """`refiners.hashing.mix` on uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def fold(state, word):
    """`refiners.hashing.fold`: state uint32, word an integer."""
    return _mix((state ^ word.to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def span(tile, columns, window, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr):
    """Half-open range of key tiles that the rows of a query tile may see, as in `mask.geometry.span`."""
    last = tl.minimum(floor_div((tile + 1) * TILE_Q - 1, TILE_K) + 1, columns)
    last = tl.where(tile >= 0, last, 0)
    first = last * 0
    if WINDOW:
        first = tl.maximum(floor_div(tile * TILE_Q - window + 1, TILE_K), 0)
    return first, last


@triton.jit
def kept(
    map_ptr, stride, column, first, last, tile, head, band, sink, every, stride_state, random_state, random_last,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PER_COLUMN: tl.constexpr,
    HAS_MAP: tl.constexpr, RULES: tl.constexpr, STRIDE: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """bool [len(column)]: the tiles in [first, last) that the map or a rule keeps.

    map_ptr: the row's entries, `stride` apart, one for PER_COLUMN tiles. See `TileMap` for the rules.
    """
    inside = (column >= first) & (column < last)
    keep = column < 0
    if RULES:
        low = floor_div(tile * TILE_Q, TILE_K)
        behind = tl.where(band >= 0, floor_div((tile + 1) * TILE_Q - 1, TILE_K) + 1, 0)
        keep = ((column >= low - band) & (column < behind)) | (column < sink)
    if STRIDE:
        phase = fold(fold(stride_state.to(tl.uint32, bitcast=True), head), tile)
        keep = keep | ((column.to(tl.uint32) + phase % every.to(tl.uint32)) % every.to(tl.uint32) == 0)
    if RANDOM:
        state = fold(fold(random_state.to(tl.uint32, bitcast=True), head), tile)
        keep = keep | (fold(state, column) <= random_last.to(tl.uint32, bitcast=True))
    if HAS_MAP:
        # Not where a rule keeps a tile already: the map is most of what is read.
        more = tl.load(map_ptr + (column // PER_COLUMN).to(tl.int64) * stride, mask=inside & (keep == 0), other=0)
        keep = keep | (more != 0)
    return keep & inside


@triton.jit
def map_row(
    map_ptr, batch, head, tile, first_position, stride_b, stride_h, stride_r, map_rows,
    TILE_Q: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """Where the entries of a query tile begin, in a map with one row for PER_ROW query tiles."""
    row = floor_div(tile, PER_ROW) - floor_div(first_position, TILE_Q * PER_ROW)
    row = tl.minimum(tl.maximum(row, 0), map_rows - 1)
    return map_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_r
