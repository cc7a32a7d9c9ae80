"""Launchers of the kernels on maps and lists: sizes, strides and storage worked out here, nothing read on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseprefill.kernels.lists.kernels import (
    ROOM,
    TALL,
    WIDE,
    Rules,
    decode_kernel,
    encode_kernel,
    ranges_kernel,
    resolve_kernel,
)
from sparseprefill.kernels.settings import FUSED

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

Lists = tuple[Tensor, Tensor, Tensor]
"""counts, offsets and indices of IndexLists."""


def encode_map(keep: Tensor) -> Lists:
    """The lists of a bool map ``[B, H, R, C]`` with any strides; heads that are views of one are listed once."""
    batch, heads, rows, columns = keep.shape
    share = heads if keep.stride(1) == 0 else 1
    counts, offsets, indices = _lists(keep.device, (batch, heads, rows), batch * (heads // share) * rows * columns)
    if counts.numel():
        encode_kernel[(batch * (heads // share) * rows,)](
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
    encode_kernel[(batch * (heads // share) * rows,)](
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
    resolve_kernel[(batch * (heads // unite) * rows,)](
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
        decode_kernel[(counts.numel(),)](
            counts.contiguous(), offsets.contiguous(), indices, out, columns, BLOCK=256, num_warps=1, **FUSED
        )
    return out


def encode_ranges(first: Tensor, last: Tensor, heads: int, width: int) -> Lists:
    """See `IndexLists.from_ranges`."""
    batch, rows, parts = first.shape
    counts, offsets, indices = _lists(first.device, (batch, heads, rows), batch * rows * width)
    if counts.numel():
        ranges_kernel[(batch * rows,)](
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
    """Of a map: strides (that of a single batch row is never used), rows, and heads that share an entry."""
    if keep is None:
        return 0, 0, 0, 0, 1, 1
    return 0 if keep.shape[0] == 1 else keep.stride(0), *keep.stride()[1:], keep.shape[2], heads // keep.shape[1]


def _numbers(rules: Rules) -> tuple[Any, ...]:
    """As kernels take them. Words of hashes are signed, so that none is of another integer type."""
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
