"""Tile maps from strips: which tiles lie on chosen diagonals or columns, written once, a byte each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.settings import cdiv
from sparseprefill.kernels.steps import floor_div

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

ROWS, COLUMNS = 8, 512
"""Query tiles and key tiles of a program."""


@triton.jit
def strips(slashes_ptr, lag, bins, past):
    """Flags of the tiles `lag` tile diagonals before the row's own, of those in `past`: from bins lag and lag - 1."""
    near = tl.load(slashes_ptr + lag, mask=past & (lag < bins), other=0)
    return near | tl.load(slashes_ptr + lag - 1, mask=past & (lag <= bins), other=0)


@triton.jit(do_not_specialize=("q_offset", "heads", "sets", "bins", "rows", "columns"))
def strip_tiles_kernel(
    slashes_ptr, columns_ptr, part_ptr, but_ptr, starts_ptr, keep_ptr, q_offset, heads, sets, bins, rows, columns,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, HAS_PART: tl.constexpr, HAS_BUT: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """keep ``[B * heads, rows, columns]`` from slashes ``[B * heads, sets, bins]`` and columns alike."""
    bh = tl.program_id(2)
    if HAS_BUT:
        skip = tl.load(but_ptr + bh) != 0
        if skip:
            return
    b = bh // heads
    start = 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + b)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    lag = (floor_div(q_offset - start, BLOCK) + row)[:, None] - column[None, :]
    own = tl.full([BLOCK_R], 0, tl.int32) + bh * sets
    if HAS_PART:
        own += tl.load(part_ptr + b * rows + row, mask=row < rows, other=0).to(tl.int32)
    past = inside & (lag > 0)
    keep = strips(slashes_ptr + own.to(tl.int64)[:, None] * bins, lag, bins, past)
    if HAS_COLUMNS:
        chosen = columns_ptr + own.to(tl.int64)[:, None] * columns + column[None, :]
        keep |= tl.load(chosen, mask=past, other=0)
    keep = tl.where(lag == 0, 1, keep).to(tl.uint8)
    tl.store(keep_ptr + (bh.to(tl.int64) * rows + row[:, None]) * columns + column[None, :], keep, mask=inside)


def strip_tiles(
    geometry: Geometry, slashes: Tensor, block: int, part: Tensor | None, columns: Tensor | None,
    but: Tensor | None = None, others: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """bool ``[B, H, R, C]``; see `sparseprefill.statistics.slashes.slash_tiles`. slashes, columns: bool ``[B, H, P, *]``.

    others: a fresh map, which is written to and returned.
    """
    batch, heads, sets, bins = slashes.shape
    rows, width = geometry.tile_rows(block), geometry.tile_columns(block)
    keep = others
    if keep is None or not keep.is_contiguous():
        keep = torch.empty(batch, heads, rows, width, dtype=torch.bool, device=slashes.device)
        if others is not None:
            keep.copy_(others)
    flags = (None if x is None else x.contiguous().view(torch.uint8) for x in (slashes, columns))
    strip_tiles_kernel[cdiv(width, COLUMNS), cdiv(rows, ROWS), batch * heads](
        *flags, None if part is None else part.contiguous(),
        None if but is None else but.contiguous().view(torch.uint8), geometry.starts, keep.view(torch.uint8),
        geometry.q_offset, heads, sets, bins, rows, width,
        BLOCK=block, BLOCK_R=ROWS, BLOCK_C=COLUMNS, HAS_COLUMNS=columns is not None, HAS_PART=part is not None,
        HAS_BUT=but is not None, HAS_STARTS=geometry.starts is not None, num_warps=4,
    )  # fmt: skip
    return keep
