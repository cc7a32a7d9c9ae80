"""Launchers of the kernels on maps and lists: sizes, strides and storage worked out here, nothing read on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseprefill.kernels.lists.kernels import (
    ROOM,
    TALL,
    WIDE,
    decode_kernel,
    encode_kernel,
    ranges_kernel,
    resolve_kernel,
)

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.mask.tile_map import TileMap

Lists = tuple[Tensor, Tensor, Tensor]
"""counts, offsets and indices of IndexLists."""
NO_RULES = (-1, 0, 1, 0, 0, 0, 0)
"""band, sink, every, stride_state, random_state, random_last, first_head."""


def encode_map(keep: Tensor) -> Lists:
    """The lists of a bool map ``[B, H, R, C]`` with any strides; heads that are views of one are listed once."""
    batch, heads, rows, columns = keep.shape
    share = heads if keep.stride(1) == 0 else 1
    counts, offsets, indices = _lists(keep.device, (batch, heads, rows), batch * (heads // share) * rows * columns)
    if counts.numel():
        encode_kernel[(batch * (heads // share) * rows,)](
            keep, None, counts, offsets, indices, *keep.stride(), rows, 1, rows, columns, heads, share, 0, 0,
            *NO_RULES, rows * columns, columns,
            TILE_Q=1, TILE_K=1, PER_ROW=1, PER_COLUMN=1, KIND=ROOM, PER=1,
            HAS_STARTS=False, REACH=False, WINDOW=False, HAS_MAP=True, RULES=False, STRIDE=False, RANDOM=False,
            **_launch(columns),
        )  # fmt: skip
    return counts, offsets, indices


def encode(tiles: TileMap) -> Lists:
    """The lists of a TileMap. They lie as close as causality (or the window) allows; neighbours with one list share it."""
    geometry = tiles.geometry
    batch, heads, rows = tiles.shape
    columns = geometry.tile_columns(tiles.tile_k)
    share = 1 if tiles.by_head else heads // _map_heads(tiles)
    kind, per, room, storage = _storage(geometry, tiles.tile_q, tiles.tile_k)
    counts, offsets, indices = _lists(geometry.device, tiles.shape, batch * (heads // share) * storage)
    keep, where = _map(tiles, indices)
    encode_kernel[(batch * (heads // share) * rows,)](
        keep, geometry.starts, counts, offsets, indices, *where, rows, columns, heads, share,
        geometry.q_offset, geometry.window or 0, *_rules(tiles), storage, room,
        **_flags(tiles), KIND=kind, PER=per, REACH=True, **_launch(columns),
    )  # fmt: skip
    return counts, offsets, indices


def resolve(tiles: TileMap, unite: int = 1) -> Tensor:
    """bool ``[B, H // unite, R, C]``: the tiles kept, within reach; those of any of `unite` neighbouring heads."""
    geometry = tiles.geometry
    batch, heads, rows = tiles.shape
    columns = geometry.tile_columns(tiles.tile_k)
    out = torch.empty(batch, heads // unite, rows, columns, dtype=torch.bool, device=geometry.device)
    keep, where = _map(tiles, out)
    resolve_kernel[(batch * (heads // unite) * rows,)](
        keep, geometry.starts, out, *where, rows, columns, heads, unite,
        geometry.q_offset, geometry.window or 0, *_rules(tiles), **_flags(tiles), **_launch(columns),
    )  # fmt: skip
    return out


def decode(lists: Lists, columns: int) -> Tensor:
    """bool ``[B, H, R, columns]`` of lists ``[B, H, R]``."""
    counts, offsets, indices = lists
    out = torch.zeros(*counts.shape, columns, dtype=torch.bool, device=counts.device)
    if out.numel():
        decode_kernel[(counts.numel(),)](
            counts.contiguous(), offsets.contiguous(), indices, out, columns, BLOCK=256, num_warps=1
        )
    return out


def encode_ranges(first: Tensor, last: Tensor, heads: int, width: int) -> Lists:
    """See `IndexLists.from_ranges`."""
    batch, rows, parts = first.shape
    counts, offsets, indices = _lists(first.device, (batch, heads, rows), batch * rows * width)
    if counts.numel():
        ranges_kernel[(batch * rows,)](
            first.contiguous(), last.contiguous(), counts, offsets, indices, rows, heads, parts, width,
            BLOCK=128, num_warps=1,
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


def _map_heads(tiles: TileMap) -> int:
    return 1 if tiles.keep is None else tiles.keep.shape[1]


def _map(tiles: TileMap, other: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The map, or any tensor for none; its strides (that of a single batch row is never used), rows, heads an entry."""
    if tiles.keep is None:
        return other, (0, 0, 0, 0, 1, 1)
    keep = tiles.keep
    strides = (0 if keep.shape[0] == 1 else keep.stride(0), *keep.stride()[1:])
    return keep, (*strides, keep.shape[2], tiles.shape[1] // keep.shape[1])


def _rules(tiles: TileMap) -> tuple[int, ...]:
    """See NO_RULES. Hash states as signed words, so that none is of another integer type."""
    stride, random = tiles.stride, tiles.random
    return (
        -1 if tiles.band is None else tiles.band,
        tiles.sink,
        1 if stride is None else stride.every,
        0 if stride is None else _signed(stride.state),
        0 if random is None else _signed(random.state),
        0 if random is None else _signed(random.bound - 1),
        tiles.first_head,
    )


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _flags(tiles: TileMap) -> dict[str, Any]:
    return {
        "TILE_Q": tiles.tile_q, "TILE_K": tiles.tile_k, "PER_ROW": tiles.per_row, "PER_COLUMN": tiles.per_column,
        "HAS_STARTS": tiles.geometry.starts is not None, "WINDOW": tiles.geometry.window is not None,
        "HAS_MAP": tiles.keep is not None, "RULES": tiles.band is not None or tiles.sink > 0,
        "STRIDE": tiles.stride is not None, "RANDOM": tiles.random is not None,
    }  # fmt: skip


def _launch(columns: int) -> dict[str, int]:
    """Small blocks for maps of tiles, which causality ends early; large ones for few and long rows of keys."""
    block, warps = (256, 1) if columns <= 1024 else (1024, 4) if columns <= 8192 else (8192, 16)
    return {"BLOCK": block, "num_warps": warps}
