"""Maps to lists and back, one launch each: a program takes the map of one query tile and stores what it keeps."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.lists.bits import kept, map_row, span
from sparseprefill.kernels.steps import floor_div

ROOM, TALL, WIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How lists lie in their storage: all with equal room; as long as causality allows, tiles taller or wider than long."""


@triton.jit
def _begin(kind: tl.constexpr, row, tile, room, per: tl.constexpr):
    """int64: where the list of a row begins in its head's storage. tile: number of the first row's query tile."""
    row, tile = row.to(tl.int64), tile.to(tl.int64)
    if kind == ROOM:
        return row * room
    if kind == TALL:  # row r has room for (tile + r + 1) * per
        return per * (row * (tile + 1) + row * (row - 1) // 2)
    # row r has room for (tile + r) // per + 1
    number, last = tile + row, tile // per
    full = number // per
    before = tile + per * (last * (last - 1) // 2) + last * (tile - last * per)
    return number + per * (full * (full - 1) // 2) + full * (number - full * per) - before


@triton.jit(
    do_not_specialize=(
        "map_ptr", "stride_b", "stride_h", "stride_r", "stride_c", "map_rows", "map_share", "rows", "columns", "heads", "share",
        "q_offset", "window", "band", "sink", "every", "stride_state", "random_state", "random_last", "first_head",
        "storage", "room",
    )
)  # fmt: skip
def encode_kernel(
    map_ptr, starts_ptr, counts_ptr, offsets_ptr, indices_ptr,
    stride_b, stride_h, stride_r, stride_c, map_rows, map_share, rows, columns, heads, share, q_offset, window,
    band, sink, every, stride_state, random_state, random_last, first_head, storage, room,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PER_ROW: tl.constexpr, PER_COLUMN: tl.constexpr, KIND: tl.constexpr, PER: tl.constexpr,
    HAS_STARTS: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr,
    HAS_MAP: tl.constexpr, RULES: tl.constexpr, STRIDE: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one query tile of one list of heads. `share` neighbouring heads have the same list."""
    program = tl.program_id(0)
    row = program % rows
    lists = heads // share
    batch, number = program // rows // lists, program // rows % lists
    head = number * share
    first_position = q_offset
    if HAS_STARTS:
        first_position -= tl.load(starts_ptr + batch)
    tile = floor_div(first_position, TILE_Q) + row
    first, last = columns * 0, columns
    if REACH:
        first, last = span(tile, columns, window, TILE_Q, TILE_K, WINDOW)
    at = map_row(
        map_ptr, batch, head // map_share, tile, first_position, stride_b, stride_h, stride_r, map_rows, TILE_Q, PER_ROW
    )
    begin = (batch * lists + number).to(tl.int64) * storage + _begin(KIND, row, q_offset // TILE_Q, room, PER)
    count = 0
    for low in range(first // BLOCK * BLOCK, last, BLOCK):
        column = low + tl.arange(0, BLOCK)
        keep = kept(
            at, stride_c, column, first, last, tile, first_head + head, band, sink, every,
            stride_state, random_state, random_last, TILE_Q, TILE_K, PER_COLUMN, HAS_MAP, RULES, STRIDE, RANDOM,
        )  # fmt: skip
        order = tl.cumsum(keep.to(tl.int32), 0)
        tl.store(indices_ptr + begin + count + order - 1, column, mask=keep)
        count += tl.sum(keep.to(tl.int32), 0)
    for other in range(share):
        place = (batch * heads + head + other).to(tl.int64) * rows + row
        tl.store(counts_ptr + place, count)
        tl.store(offsets_ptr + place, begin)


@triton.jit(
    do_not_specialize=(
        "map_ptr", "stride_b", "stride_h", "stride_r", "stride_c", "map_rows", "map_share", "rows", "columns", "heads", "unite",
        "q_offset", "window", "band", "sink", "every", "stride_state", "random_state", "random_last", "first_head",
    )
)  # fmt: skip
def resolve_kernel(
    map_ptr, starts_ptr, out_ptr,
    stride_b, stride_h, stride_r, stride_c, map_rows, map_share, rows, columns, heads, unite, q_offset, window,
    band, sink, every, stride_state, random_state, random_last, first_head,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PER_ROW: tl.constexpr, PER_COLUMN: tl.constexpr,
    HAS_STARTS: tl.constexpr, WINDOW: tl.constexpr,
    HAS_MAP: tl.constexpr, RULES: tl.constexpr, STRIDE: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one query tile, as a row of a bool map; what any of `unite` neighbouring heads keeps."""
    program = tl.program_id(0)
    row = program % rows
    groups = heads // unite
    batch, number = program // rows // groups, program // rows % groups
    first_position = q_offset
    if HAS_STARTS:
        first_position -= tl.load(starts_ptr + batch)
    tile = floor_div(first_position, TILE_Q) + row
    first, last = span(tile, columns, window, TILE_Q, TILE_K, WINDOW)
    out_ptr += program.to(tl.int64) * columns
    for low in range(0, columns, BLOCK):
        column = low + tl.arange(0, BLOCK)
        keep = column < 0
        if (low < last) & (low + BLOCK > first):
            for head in range(number * unite, (number + 1) * unite):
                at = map_row(
                    map_ptr, batch, head // map_share, tile, first_position, stride_b, stride_h, stride_r, map_rows,
                    TILE_Q, PER_ROW,
                )  # fmt: skip
                keep = keep | kept(
                    at, stride_c, column, first, last, tile, first_head + head, band, sink, every,
                    stride_state, random_state, random_last, TILE_Q, TILE_K, PER_COLUMN, HAS_MAP, RULES, STRIDE, RANDOM,
                )  # fmt: skip
        tl.store(out_ptr + column, keep, mask=column < columns)


@triton.jit(do_not_specialize=("columns",))
def decode_kernel(counts_ptr, offsets_ptr, indices_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """One program: one list, marked in its row of a bool map that holds nothing yet."""
    row = tl.program_id(0)
    count = tl.load(counts_ptr + row)
    indices_ptr += tl.load(offsets_ptr + row)
    out_ptr += row.to(tl.int64) * columns
    for low in range(0, count, BLOCK):
        slot = low + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + slot, mask=slot < count, other=-1)
        tl.store(out_ptr + index, index >= 0, mask=(index >= 0) & (index < columns))


@triton.jit(do_not_specialize=("rows", "heads", "parts", "width"))
def ranges_kernel(
    first_ptr, last_ptr, counts_ptr, offsets_ptr, indices_ptr, rows, heads, parts, width, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: the list of one row, made of `parts` runs, for all heads."""
    program = tl.program_id(0)
    batch, row = program // rows, program % rows
    begin = program.to(tl.int64) * width
    count = 0
    for part in range(parts):
        at = program.to(tl.int64) * parts + part
        first, last = tl.load(first_ptr + at).to(tl.int32), tl.load(last_ptr + at).to(tl.int32)
        for low in range(first, last, BLOCK):
            index = low + tl.arange(0, BLOCK)
            slot = count + index - first
            tl.store(indices_ptr + begin + slot, index, mask=(index < last) & (slot < width))
        count += tl.maximum(last - first, 0)
    for head in range(heads):
        place = (batch * heads + head).to(tl.int64) * rows + row
        tl.store(counts_ptr + place, count)
        tl.store(offsets_ptr + place, begin)
