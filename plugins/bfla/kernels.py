"""Equations 3 to 14 in four launches: block scores without a score matrix, their softmax, top mass, tiles of the blocks.

The first and the last kernel are here, the other two are core's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.groups import (
    RUNTIME,
    GroupTiles,
    Operands,
    Tile,
    first_query_group,
    group_products,
    places,
    program_tile,
    token_row,
)
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.statistics.softmax import tile_softmax
from sparseprefill.kernels.steps import batch_row, factor, floor_div
from sparseprefill.statistics.select import top_mass


@triton.jit
def _highest(x, PER: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """[M / PER, N / PER]: the maximum of each cell of x [M, N]."""
    if PER > 1:
        x = tl.max(tl.reshape(x, [M, N // PER, PER]), 2)
        x = tl.max(tl.reshape(x, [M // PER, PER, N // PER]), 1)
    return x


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("table_ptr", "k_scale_ptr"))
def block_scores_kernel(
    scores_ptr, q_ptr, k_ptr, table_ptr, k_scale_ptr, q_desc, k_desc, starts_ptr, lengths_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, q_shift,
    q_offset, q_len, kv_len, tiles, skipped, base, heads, kv_group, rows, columns,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores ``[batch, heads, rows, columns]`` of blocks: the largest dot product of their token groups (eq. 3 and 4).

    One program: one tile of group pairs. Blocks without a query or a key, and of the future, may stay unwritten.
    """
    per: tl.constexpr = BLOCK // SIZE
    x = Operands(
        q_ptr, k_ptr, table_ptr, factor(k_scale_ptr), q_desc, k_desc,
        stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, q_shift,
    )  # fmt: skip
    b, h, hk, row, column = program_tile(tl.program_id(0), tiles, skipped, base, heads, kv_group, BLOCK_M, BLOCK_N)
    tokens = token_row(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len)
    first_q, first_k = first_query_group(tokens.first, row, BLOCK, SIZE, BLOCK_M), column * BLOCK_N
    if (first_k >= first_q + BLOCK_M) | (first_k * SIZE >= tokens.high) | (first_q * SIZE >= tokens.high):
        return
    acc = group_products(
        x, Tile(b, h, hk, first_q, first_k), tokens, False,
        SIZE, False, 0, BLOCK_M, BLOCK_N, BLOCK_K, D, TMA, PAGE, PRECISION,
    )  # fmt: skip
    # A pair of groups counts where both hold a token at some place; keys do from place 0 on.
    q_low, q_high = places(first_q + tl.arange(0, BLOCK_M), tokens.low, tokens.high, SIZE)
    _, k_high = places(first_k + tl.arange(0, BLOCK_N), 0, tokens.high, SIZE)
    acc = tl.where(q_low[:, None] < tl.minimum(q_high[:, None], k_high[None, :]), acc, float("-inf"))
    score = _highest(acc, per, BLOCK_M, BLOCK_N)  # [BLOCK_M / per, BLOCK_N / per]
    nan = _highest((acc != acc).to(tl.int32), per, BLOCK_M, BLOCK_N)  # tl.max passes a NaN over
    score = tl.where(nan > 0, float("nan"), score)
    r = row * (BLOCK_M // per) + tl.arange(0, BLOCK_M // per)
    c = column * (BLOCK_N // per) + tl.arange(0, BLOCK_N // per)
    where = ((b * heads + h).to(tl.int64) * rows + r)[:, None] * columns + c[None, :]
    tl.store(scores_ptr + where, score, mask=(r < rows)[:, None] & (c < columns)[None, :])


@triton.jit(do_not_specialize=("q_offset", "rows", "columns", "tile_rows", "tile_columns", "heads"))
def block_tiles_kernel(
    keep_ptr, top_ptr, nonfinite_ptr, starts_ptr, q_offset, rows, columns, tile_rows, tile_columns, heads,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """keep ``[batch, heads, tile_rows, tile_columns]``: each tile takes its block's choice (eq. 13 and 14).

    Blocks are kept that are in `top` or nonfinite. One program: one row of tiles.
    """
    bh, t = tl.program_id(1), tl.program_id(0)
    _, _, first = batch_row(bh // heads, starts_ptr, None, q_offset, 0)
    r = floor_div(floor_div(first, TILE) + t, BLOCK // TILE) - floor_div(first, BLOCK)
    r = tl.minimum(tl.maximum(r, 0), rows - 1)
    line = (bh.to(tl.int64) * rows + r) * columns
    for at in tl.range(0, tile_columns, WIDTH):
        c = at + tl.arange(0, WIDTH)
        inside = c < tile_columns
        block = c // (BLOCK // TILE)
        keep = tl.load(top_ptr + line + block, mask=inside, other=0) | tl.load(
            nonfinite_ptr + line + block, mask=inside, other=0
        )
        tl.store(keep_ptr + (bh.to(tl.int64) * tile_rows + t) * tile_columns + c, keep, mask=inside)


def kept_tiles(
    call: AttentionCall, block: int, size: int, alpha: float, softcap: float | None, keep_mass: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Kept tiles (`stages.kept_tiles`): bool ``[B, Hq, R, C]`` by tiles of `tile` tokens; and blocks' float32 masses."""
    mass = block_scores(call, block, size)
    nonfinite = torch.empty(mass.shape, dtype=torch.uint8, device=mass.device)
    tile_softmax(call, mass, block, alpha, softcap, nonfinite)  # in place, and what is NaN or infinite
    return block_tiles(call, top_mass(mass, keep_mass), nonfinite, block, tile), mass


def block_scores(call: AttentionCall, block: int, size: int) -> Tensor:
    """See `scores.block_scores`; only blocks that hold a causal pair are written."""
    geometry, tiles = call.geometry, GroupTiles.of(call, block, size)
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(block)
    scores = torch.empty(geometry.batch, geometry.heads, rows, columns, dtype=torch.float32, device=geometry.device)
    for part in tiles.parts(range(tiles.count)):
        enqueue(block_scores_kernel, (part.programs,),
            scores, *part.arguments, rows, columns, **part.flags, **tiles.settings.options,
        )  # fmt: skip
    return scores


def block_tiles(call: AttentionCall, top: Tensor, nonfinite: Tensor, block: int, tile: int) -> Tensor:
    """bool ``[B, Hq, R, C]`` on tiles of `tile` tokens: those of the blocks in `top` (bool) or `nonfinite` (uint8)."""
    geometry, (batch, heads, rows, columns) = call.geometry, top.shape
    tile_rows, tile_columns = geometry.tile_rows(tile), geometry.tile_columns(tile)
    keep = torch.empty(batch, heads, tile_rows, tile_columns, dtype=torch.bool, device=top.device)
    enqueue(block_tiles_kernel, (tile_rows, batch * heads),
        keep.view(torch.uint8), top.contiguous().view(torch.uint8), nonfinite, geometry.starts, geometry.q_offset,
        rows, columns, tile_rows, tile_columns, heads,
        BLOCK=block, TILE=tile, WIDTH=1024, num_warps=4, **FUSED,
    )  # fmt: skip
    return keep
