"""Tile maps from columns and diagonals: which tiles lie on the kept ones, written once, a byte each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED, cdiv
from sparseprefill.kernels.steps import batch_row, floor_div
from sparseprefill.mask.geometry import Geometry

ROWS, COLUMNS = 8, 512
"""Query tiles and key tiles of a program."""


@triton.jit
def on_diagonals(slashes_ptr, lag, bins, past):
    """Flags of the tiles `lag` tile diagonals before the row's own, of those in `past`: from bins lag and lag - 1.

    A bin of distances holds pairs of two tile diagonals; see `sparseprefill.statistics.slashes.slash_tiles`.
    """
    near = tl.load(slashes_ptr + lag, mask=past & (lag < bins), other=0)  # [BLOCK_R, BLOCK_C]
    return near | tl.load(slashes_ptr + lag - 1, mask=past & (lag <= bins), other=0)


@triton.jit(do_not_specialize=("q_offset", "heads", "sets", "bins", "rows", "columns"))
def diagonal_tiles_kernel(
    slashes_ptr, columns_ptr, part_ptr, exclude_ptr, starts_ptr, keep_ptr, q_offset, heads, sets, bins, rows, columns,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """keep ``[B * heads, rows, columns]`` from slashes ``[B * heads, sets, bins]`` and columns alike, or None.

    The vertical-slash pattern (MInference, Jiang et al., 2024; SharePrefill's Algorithm 5) on tiles. One program:
    BLOCK_R query tiles by BLOCK_C key tiles of one head. part_ptr: which of the sets governs a query tile, or None for
    the only one. exclude_ptr: heads whose map is left as it is, or None.
    """
    bh = tl.program_id(2)
    if exclude_ptr is not None:
        skip = tl.load(exclude_ptr + bh) != 0
        if skip:
            return
    b = bh // heads
    _, _, first = batch_row(b, starts_ptr, None, q_offset, 0)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    lag = (floor_div(first, BLOCK) + row)[:, None] - column[None, :]  # [BLOCK_R, BLOCK_C]
    own = tl.full([BLOCK_R], 0, tl.int32) + bh * sets
    if part_ptr is not None:
        own += tl.load(part_ptr + b * rows + row, mask=row < rows, other=0).to(tl.int32)  # [BLOCK_R]
    past = inside & (lag > 0)
    keep = on_diagonals(slashes_ptr + own.to(tl.int64)[:, None] * bins, lag, bins, past)
    if columns_ptr is not None:
        line = columns_ptr + own.to(tl.int64)[:, None] * columns + column[None, :]
        keep |= tl.load(line, mask=past, other=0)  # [BLOCK_R, BLOCK_C]
    keep = tl.where(lag == 0, 1, keep).to(tl.uint8)
    tl.store(keep_ptr + (bh.to(tl.int64) * rows + row[:, None]) * columns + column[None, :], keep, mask=inside)


def diagonal_tiles(
    geometry: Geometry, slashes: Tensor, block: int, part: Tensor | None, columns: Tensor | None,
    exclude: Tensor | None = None, others: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """bool ``[B, H, R, C]``; see `sparseprefill.statistics.slashes.slash_tiles`. slashes, columns: bool ``[B, H, P, *]``.

    exclude, others: heads, bool ``[B, H]``, that keep the tiles of a fresh map, which is written to and returned.
    """
    batch, heads, sets, bins = slashes.shape
    rows, width = geometry.tile_rows(block), geometry.tile_columns(block)
    keep = others
    if keep is None or not keep.is_contiguous():
        keep = torch.empty(batch, heads, rows, width, dtype=torch.bool, device=slashes.device)
        if others is not None:
            keep.copy_(others)
    flags = (None if x is None else x.contiguous().view(torch.uint8) for x in (slashes, columns))
    enqueue(diagonal_tiles_kernel, (cdiv(width, COLUMNS), cdiv(rows, ROWS), batch * heads),
        *flags, None if part is None else part.contiguous(),
        None if exclude is None else exclude.contiguous().view(torch.uint8), geometry.starts, keep.view(torch.uint8),
        geometry.q_offset, heads, sets, bins, rows, width,
        BLOCK=block, BLOCK_R=ROWS, BLOCK_C=COLUMNS, num_warps=4, **FUSED,
    )  # fmt: skip
    return keep
