"""What sampled rows choose, given to the query tiles that they speak for; see `sparseprefill.refiners.recall`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.settings import FUSED, cdiv
from sparseprefill.kernels.steps import floor_div

WIDE = 1024
"""Key tiles of a program, at most."""


@triton.jit
def _heard(chosen_ptr, own_ptr, sample, line, row, column, columns, inside, TILE_Q: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """[BLOCK]: whether the sample has chosen a key tile, or that which lies as far from its own diagonal."""
    own = tl.load(own_ptr + sample).to(tl.int32)
    at = chosen_ptr + line * columns
    heard = tl.load(at + column, mask=inside, other=0)
    apart = (own - row) * TILE_Q
    moved = column + floor_div(apart, TILE_K)
    heard |= tl.load(at + moved, mask=inside & (moved >= 0) & (moved < columns), other=0)
    if TILE_Q % TILE_K != 0:
        moved = column + floor_div(apart + TILE_K - 1, TILE_K)
        heard |= tl.load(at + moved, mask=inside & (moved >= 0) & (moved < columns), other=0)
    return heard


@triton.jit(do_not_specialize=("heads", "samples", "each", "rows", "columns"))
def spread_kernel(
    chosen_ptr, own_ptr, of_ptr, free_ptr, out_ptr, heads, samples, each, rows, columns,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out ``[B, Hq, R, C]``: of the free key tiles those that a query tile's sample chose, or, with NEIGHBOURS, the one
    before it in its span. chosen: bytes ``[B, Hq, n, C]``. own ``[B, n]``, of ``[B, R]``: see `Stretches`, int64.

    One program: BLOCK key tiles of one query tile of one head.
    """
    line = tl.program_id(0)
    row = line % rows
    bh = line // rows
    b = bh // heads
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    sample = tl.load(of_ptr + b * rows + row).to(tl.int32)
    heard = _heard(
        chosen_ptr, own_ptr, b * samples + sample, bh.to(tl.int64) * samples + sample, row, column, columns, inside,
        TILE_Q, TILE_K,
    )  # fmt: skip
    if NEIGHBOURS:
        before = tl.maximum(sample - 1, 0)
        reach = tl.where(sample % each > 0, columns, 0)  # the first of a span has nobody before it
        heard |= _heard(
            chosen_ptr, own_ptr, b * samples + before, bh.to(tl.int64) * samples + before, row, column, columns,
            column < reach, TILE_Q, TILE_K,
        )  # fmt: skip
    place = line.to(tl.int64) * columns + column
    free = tl.load(free_ptr + place, mask=inside, other=0)
    tl.store(out_ptr + place, heard & free, mask=inside)


def spread(
    chosen: Tensor, own: Tensor, of: Tensor, each: int, free: Tensor, grid: tuple[int, int], *, neighbours: bool
) -> Tensor:
    """bool ``[B, Hq, R, C]``; the arguments as `spread_kernel` has them, bool in place of bytes. One launch."""
    (batch, heads, samples, columns), rows = chosen.shape, of.shape[1]
    out = torch.empty(batch, heads, rows, columns, dtype=torch.bool, device=chosen.device)
    block = min(WIDE, triton.next_power_of_2(columns))
    spread_kernel[batch * heads * rows, cdiv(columns, block)](
        chosen.contiguous().view(torch.uint8), own.contiguous(), of.contiguous(), free.contiguous().view(torch.uint8),
        out.view(torch.uint8), heads, samples, each, rows, columns,
        TILE_Q=grid[0], TILE_K=grid[1], NEIGHBOURS=neighbours, BLOCK=block, num_warps=4, **FUSED,
    )  # fmt: skip
    return out
