"""Maps of tiles to lists and back, one launch each: a program takes one query tile's row and stores what it keeps.

Sizes and rules come flat, so that none of them makes another kernel; within one they travel as `Map` and `Rules`. The
launchers read nothing on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.steps import batch_row, floor_div
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.recorded import OfLayer

ROOM, TALL, WIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Ways in which lists lie in their storage: all with equal room; as long as causality allows, tiles taller or wider than long."""
EMPTIED = 1024
"""Counts that a program of `emptied_kernel` looks at."""


class Map(NamedTuple):
    """A bool map of tiles: where it lies, or None for no map; its strides; its rows; heads that share an entry."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_r: Any
    stride_c: Any
    rows: Any
    share: Any


class Rules(NamedTuple):
    """Tiles that are kept beside a map's; see `TileMap`. On the host None switches a rule off; kernels have flags.

    band: the diagonal tiles and so many before them. sink: so many first tiles. every, stride_state: each `every`-th
    tile, from a phase by hash. random_state, random_last: tiles whose hash is at most `random_last`. States and hashes
    are 32-bit words; the launcher makes them signed. first_head: the number of head 0, which hashes depend on.
    dense: query tiles that keep every key tile, a half-open range; on the host also a tensor, one range a batch row.
    """

    band: Any = None
    sink: Any = 0
    every: Any = None
    stride_state: Any = 0
    random_state: Any = 0
    random_last: Any = None
    first_head: Any = 0
    dense: Any = None


@triton.jit
def _dense_from(tile, batch, columns, dense_ptr, dense_first, dense_behind):
    """From which key tile on a query tile keeps all: the first where it is dense, else behind the last.

    dense_ptr: int32 [B, 2], the range of each batch row; None for one range.
    """
    if dense_ptr is not None:
        dense_first, dense_behind = tl.load(dense_ptr + 2 * batch), tl.load(dense_ptr + 2 * batch + 1)
    return tl.where((tile >= dense_first) & (tile < dense_behind), 0, columns)


@triton.jit
def _mix(x):
    """`mask.tile_map.mix` on uint32."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _fold(state, word):
    """`mask.tile_map.fold`: state uint32, word an integer."""
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
def _map_row(tiles, batch, head, tile, first_position, TILE_Q: tl.constexpr, PER_ROW: tl.constexpr):
    """Address of the first entry of a query tile, in a map with one row for PER_ROW query tiles."""
    row = floor_div(tile, PER_ROW) - floor_div(first_position, TILE_Q * PER_ROW)
    row = tl.minimum(tl.maximum(row, 0), tiles.rows - 1)
    line = tiles.ptr + batch.to(tl.int64) * tiles.stride_b + (head // tiles.share).to(tl.int64) * tiles.stride_h
    return line + row.to(tl.int64) * tiles.stride_r


@triton.jit
def _kept(
    line_ptr, stride, rules, column, first, last, tile, head,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PER_COLUMN: tl.constexpr,
    RULES: tl.constexpr, STRIDE: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """bool [len(column)]: the tiles in [first, last) that the map or a rule keeps.

    line_ptr: the row's entries, `stride` apart, one for PER_COLUMN tiles; None for no map. rules.dense: from which tile on this
    row keeps all.
    """
    inside = (column >= first) & (column < last)
    keep = column < 0
    if RULES:
        low = floor_div(tile * TILE_Q, TILE_K)
        behind = tl.where(rules.band >= 0, floor_div((tile + 1) * TILE_Q - 1, TILE_K) + 1, 0)
        keep = ((column >= low - rules.band) & (column < behind)) | (column < rules.sink)
        keep = keep | (column >= rules.dense)
    if STRIDE:
        every = rules.every.to(tl.uint32)
        phase = _fold(_fold(rules.stride_state.to(tl.uint32, bitcast=True), rules.first_head + head), tile)
        keep = keep | ((column.to(tl.uint32) + phase % every) % every == 0)
    if RANDOM:
        state = _fold(_fold(rules.random_state.to(tl.uint32, bitcast=True), rules.first_head + head), tile)
        keep = keep | (_fold(state, column) <= rules.random_last.to(tl.uint32, bitcast=True))
    if line_ptr is not None:
        # Not where a rule keeps a tile already: the map is most of what is read.
        more = tl.load(line_ptr + (column // PER_COLUMN).to(tl.int64) * stride, mask=inside & (keep == 0), other=0)
        keep = keep | (more != 0)
    return keep & inside


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
        "dense_first", "dense_behind",
        "storage", "room",
    )
)  # fmt: skip
def encode_kernel(
    map_ptr, starts_ptr, counts_ptr, offsets_ptr, indices_ptr,
    stride_b, stride_h, stride_r, stride_c, map_rows, map_share, rows, columns, heads, share, q_offset, window,
    band, sink, every, stride_state, random_state, random_last, first_head, dense_ptr, dense_first, dense_behind,
    storage, room,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PER_ROW: tl.constexpr, PER_COLUMN: tl.constexpr, KIND: tl.constexpr, PER: tl.constexpr,
    REACH: tl.constexpr, WINDOW: tl.constexpr,
    RULES: tl.constexpr, STRIDE: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A map with its rules to lists (ours). One program: one query tile of one list of heads.

    It walks the key tiles in reach BLOCK at a time, and a running sum gives each kept one its slot in the list. `share`
    neighbouring heads have the same list, which is stored once. REACH: only tiles that causality and window allow.
    """
    tiles = Map(map_ptr, stride_b, stride_h, stride_r, stride_c, map_rows, map_share)
    program = tl.program_id(0)
    row = program % rows
    lists = heads // share
    batch, number = program // rows // lists, program // rows % lists
    head = number * share
    _, _, first_position = batch_row(batch, starts_ptr, None, q_offset, 0)
    tile = floor_div(first_position, TILE_Q) + row
    dense = _dense_from(tile, batch, columns, dense_ptr, dense_first, dense_behind)
    rules = Rules(band, sink, every, stride_state, random_state, random_last, first_head, dense)
    first, last = columns * 0, columns
    if REACH:
        first, last = span(tile, columns, window, TILE_Q, TILE_K, WINDOW)
    line_ptr = map_ptr
    if map_ptr is not None:
        line_ptr = _map_row(tiles, batch, head, tile, first_position, TILE_Q, PER_ROW)
    begin = (batch * lists + number).to(tl.int64) * storage + _begin(KIND, row, q_offset // TILE_Q, room, PER)
    count = 0
    for low in range(first // BLOCK * BLOCK, last, BLOCK):
        column = low + tl.arange(0, BLOCK)
        keep = _kept(
            line_ptr, stride_c, rules, column, first, last, tile, head,
            TILE_Q, TILE_K, PER_COLUMN, RULES, STRIDE, RANDOM,
        )  # fmt: skip
        order = tl.cumsum(keep.to(tl.int32), 0)  # [BLOCK]
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
        "dense_first", "dense_behind",
    )
)  # fmt: skip
def resolve_kernel(
    map_ptr, starts_ptr, out_ptr,
    stride_b, stride_h, stride_r, stride_c, map_rows, map_share, rows, columns, heads, unite, q_offset, window,
    band, sink, every, stride_state, random_state, random_last, first_head, dense_ptr, dense_first, dense_behind,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PER_ROW: tl.constexpr, PER_COLUMN: tl.constexpr,
    WINDOW: tl.constexpr,
    RULES: tl.constexpr, STRIDE: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A map with its rules to a plain bool map (ours). One program: the row of one query tile.

    It holds what any of `unite` neighbouring heads keeps, such as those of a GQA group.
    """
    tiles = Map(map_ptr, stride_b, stride_h, stride_r, stride_c, map_rows, map_share)
    program = tl.program_id(0)
    row = program % rows
    groups = heads // unite
    batch, number = program // rows // groups, program // rows % groups
    _, _, first_position = batch_row(batch, starts_ptr, None, q_offset, 0)
    tile = floor_div(first_position, TILE_Q) + row
    dense = _dense_from(tile, batch, columns, dense_ptr, dense_first, dense_behind)
    rules = Rules(band, sink, every, stride_state, random_state, random_last, first_head, dense)
    first, last = span(tile, columns, window, TILE_Q, TILE_K, WINDOW)
    out_ptr += program.to(tl.int64) * columns
    for low in range(0, columns, BLOCK):
        column = low + tl.arange(0, BLOCK)
        keep = column < 0
        if (low < last) & (low + BLOCK > first):
            for head in range(number * unite, (number + 1) * unite):
                line_ptr = map_ptr
                if map_ptr is not None:
                    line_ptr = _map_row(tiles, batch, head, tile, first_position, TILE_Q, PER_ROW)
                keep = keep | _kept(
                    line_ptr, stride_c, rules, column, first, last, tile, head,
                    TILE_Q, TILE_K, PER_COLUMN, RULES, STRIDE, RANDOM,
                )  # fmt: skip
        tl.store(out_ptr + column, keep, mask=column < columns)


@triton.jit(do_not_specialize=("columns",))
def decode_kernel(counts_ptr, offsets_ptr, indices_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """Lists to a bool map (ours). One program: one list, marked in its row of a map that holds nothing yet."""
    row = tl.program_id(0)
    count = tl.load(counts_ptr + row)
    indices_ptr += tl.load(offsets_ptr + row)
    out_ptr += row.to(tl.int64) * columns
    for low in range(0, count, BLOCK):
        slot = low + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + slot, mask=slot < count, other=-1)  # [BLOCK]
        tl.store(out_ptr + index, index >= 0, mask=(index >= 0) & (index < columns))


@triton.jit(do_not_specialize=("count", "heads", "rows"))
def emptied_kernel(counts_ptr, without_ptr, out_ptr, count, heads, rows, BLOCK: tl.constexpr):
    """out ``[B, H, R]``: see `emptied`, whose operator of torch takes the host five times as long. One program: BLOCK of
    them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = at // (heads * rows) * rows + at % rows
    gone = tl.load(without_ptr + row, mask=at < count, other=0)
    tl.store(out_ptr + at, tl.where(gone != 0, 0, tl.load(counts_ptr + at, mask=at < count, other=0)), mask=at < count)


@triton.jit(do_not_specialize=("rows", "heads", "parts", "width"))
def ranges_kernel(
    first_ptr, last_ptr, counts_ptr, offsets_ptr, indices_ptr, rows, heads, parts, width, BLOCK: tl.constexpr
):  # fmt: skip
    """Half-open ranges to lists (ours). One program: the list of one row, made of `parts` runs, for all heads."""
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


Lists = tuple[Tensor, Tensor, Tensor]
"""counts, offsets and indices of IndexLists."""


def emptied(counts: Tensor, without: Tensor) -> Tensor:
    """int32 ``[B, H, R]``: counts, and 0 where `without`, bool ``[B, R]``."""
    counts, made = counts.contiguous(), torch.empty(counts.shape, dtype=torch.int32, device=counts.device)
    enqueue(emptied_kernel, (-(-counts.numel() // EMPTIED),),
        counts, without.contiguous().view(torch.int8), made, counts.numel(), *counts.shape[1:],
        BLOCK=EMPTIED, num_warps=4, **FUSED,
    )  # fmt: skip
    return made


def encode_map(keep: Tensor) -> Lists:
    """The lists of a bool map ``[B, H, R, C]`` with any strides; heads that are views of one are listed once."""
    batch, heads, rows, columns = keep.shape
    share = heads if keep.stride(1) == 0 else 1
    counts, offsets, indices = _lists(keep.device, (batch, heads, rows), batch * (heads // share) * rows * columns)
    if counts.numel():
        enqueue(encode_kernel, (batch * (heads // share) * rows,),
            keep, None, counts, offsets, indices, *keep.stride(), rows, 1, rows, columns, heads, share, 0, 0,
            *_numbers(Rules()), rows * columns, columns,
            TILE_Q=1, TILE_K=1, PER_ROW=1, PER_COLUMN=1, KIND=ROOM, PER=1, REACH=False, WINDOW=False,
            **_rule_flags(Rules()), **_launch(columns),
        )  # fmt: skip
    return counts, offsets, indices


def encode(
    geometry: Geometry, tile_q: int, tile_k: int, keep: Tensor | None, rules: Rules, per_row: int = 1,
    per_column: int = 1,
) -> Lists:  # fmt: skip
    """The lists of what a map and rules keep; arguments as the fields of `TileMap`.

    They lie as close as causality (or the window) allows; neighbouring heads with one list share it.
    """
    batch, heads, rows, columns = geometry.map_shape(tile_q, tile_k)
    by_head = rules.every is not None or rules.random_last is not None
    share = 1 if by_head else heads if keep is None else heads // keep.shape[1]
    kind, per, room, storage = _storage(geometry, tile_q, tile_k)
    counts, offsets, indices = _lists(geometry.device, (batch, heads, rows), batch * (heads // share) * storage)
    enqueue(encode_kernel, (batch * (heads // share) * rows,),
        keep, geometry.starts, counts, offsets, indices, *_where(keep, heads), rows, columns, heads, share,
        geometry.q_offset, geometry.window or 0, *_numbers(rules), storage, room,
        TILE_Q=tile_q, TILE_K=tile_k, PER_ROW=per_row, PER_COLUMN=per_column, KIND=kind, PER=per, REACH=True,
        WINDOW=geometry.window is not None, **_rule_flags(rules), **_launch(columns),
    )  # fmt: skip
    return counts, offsets, indices


def resolve(
    geometry: Geometry, tile_q: int, tile_k: int, keep: Tensor | None, rules: Rules, per_row: int = 1,
    per_column: int = 1, unite: int = 1,
) -> Tensor:  # fmt: skip
    """bool ``[B, H // unite, R, C]``: the tiles kept, within reach; those of any of `unite` neighbouring heads."""
    batch, heads, rows, columns = geometry.map_shape(tile_q, tile_k)
    out = torch.empty(batch, heads // unite, rows, columns, dtype=torch.bool, device=geometry.device)
    enqueue(resolve_kernel, (batch * (heads // unite) * rows,),
        keep, geometry.starts, out, *_where(keep, heads), rows, columns, heads, unite,
        geometry.q_offset, geometry.window or 0, *_numbers(rules),
        TILE_Q=tile_q, TILE_K=tile_k, PER_ROW=per_row, PER_COLUMN=per_column,
        WINDOW=geometry.window is not None, **_rule_flags(rules), **_launch(columns),
    )  # fmt: skip
    return out


def decode(lists: Lists, columns: int) -> Tensor:
    """bool ``[B, H, R, columns]`` of lists ``[B, H, R]``."""
    counts, offsets, indices = lists
    out = torch.zeros(*counts.shape, columns, dtype=torch.bool, device=counts.device)
    if out.numel():
        enqueue(decode_kernel, (counts.numel(),),
            counts.contiguous(), offsets.contiguous(), indices, out, columns, BLOCK=256, num_warps=1,
            **FUSED,
        )  # fmt: skip
    return out


def encode_ranges(first: Tensor, last: Tensor, heads: int, width: int) -> Lists:
    """See `IndexLists.from_ranges`."""
    batch, rows, parts = first.shape
    counts, offsets, indices = _lists(first.device, (batch, heads, rows), batch * rows * width)
    if counts.numel():
        enqueue(ranges_kernel, (batch * rows,),
            first.contiguous(), last.contiguous(), counts, offsets, indices, rows, heads, parts, width,
            BLOCK=128, num_warps=1, **FUSED,
        )  # fmt: skip
    return counts, offsets, indices


def _lists(device: torch.device, shape: tuple[int, int, int], length: int) -> Lists:
    counts = torch.empty(shape, dtype=torch.int32, device=device)
    offsets = torch.empty(shape, dtype=torch.int64, device=device)
    return counts, offsets, torch.empty(max(length, 1), dtype=torch.int32, device=device)


def _storage(geometry: Geometry, tile_q: int, tile_k: int) -> tuple[Any, int, int, int]:
    """(kind, per, room of a list where all have the same, entries of a head): upper bounds from sizes alone.

    Rows that start later see fewer tiles than those that start at 0, from which the bounds are made.
    """
    rows, columns = geometry.tile_rows(tile_q), geometry.tile_columns(tile_k)
    room = columns if geometry.window is None else min(columns, (tile_q + geometry.window - 2) // tile_k + 2)
    first = geometry.q_offset // tile_q
    if tile_q % tile_k == 0:
        kind, per = TALL, tile_q // tile_k
        total = per * (rows * (first + 1) + rows * (rows - 1) // 2)
    elif tile_k % tile_q == 0:
        kind, per = WIDE, tile_k // tile_q
        total = _steps(first + rows, per) - _steps(first, per)
    else:
        kind, per, total = ROOM, 1, rows * room
    return (kind, per, 0, total) if total < rows * room else (ROOM, 1, room, rows * room)


def _steps(number: int, per: int) -> int:
    """Sum of ``x // per + 1`` over x below `number`."""
    full = number // per
    return number + per * (full * (full - 1) // 2) + full * (number - full * per)


def _where(keep: Tensor | None, heads: int) -> tuple[int, ...]:
    """Strides of a map (that of a single batch row is never used), its rows, and the heads that share an entry."""
    if keep is None:
        return 0, 0, 0, 0, 1, 1
    return 0 if keep.shape[0] == 1 else keep.stride(0), *keep.stride()[1:], keep.shape[2], heads // keep.shape[1]


def _numbers(rules: Rules) -> tuple[Any, ...]:
    """Rules as kernels take them. Words of hashes are signed, so that none is of another integer type."""
    ranges = rules.dense if isinstance(rules.dense, Tensor) else None
    first, behind = (0, 0) if ranges is not None or rules.dense is None else rules.dense
    numbers = Rules(
        band=-1 if rules.band is None else rules.band,
        sink=rules.sink,
        every=1 if rules.every is None else rules.every,
        stride_state=_signed(rules.stride_state),
        random_state=_signed(rules.random_state),
        random_last=0 if rules.random_last is None else _signed(rules.random_last),
        first_head=rules.first_head,
    )
    return *numbers[:-1], None if ranges is None else ranges.contiguous(), first, behind


def _signed(word: int) -> int:
    if isinstance(word, OfLayer):
        return word.then(_signed)
    return word - (1 << 32) if word >> 31 else word


def _rule_flags(rules: Rules) -> dict[str, bool]:
    return {
        "RULES": rules.band is not None or rules.sink > 0 or rules.dense is not None,
        "STRIDE": rules.every is not None,
        "RANDOM": rules.random_last is not None,
    }


def _launch(columns: int) -> dict[str, int | bool]:
    """Small blocks for maps of tiles, which causality ends early; large ones for few and long rows of keys."""
    block, warps = (256, 1) if columns <= 1024 else (1024, 4) if columns <= 8192 else (8192, 16)
    return {"BLOCK": block, "num_warps": warps, **FUSED}
