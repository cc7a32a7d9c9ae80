"""Softmax over the rows of a tile map, in place, and the parts of it that other kernels share."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.lists.maps import span
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.steps import LOG2E, batch_row, floor_div


@triton.jit
def row_logits(line_ptr, c, begin, end, scale, softcap, SOFTCAP: tl.constexpr, FINITE: tl.constexpr):
    """Base-2 logits of the tiles `c`, -inf outside [begin, end); and which are seen. FINITE: -inf for NaN and infinite
    ones too, and which of the seen are those."""
    seen = (c >= begin) & (c < end)
    x = tl.load(line_ptr + c, mask=seen, other=0.0) * scale  # [WIDTH]
    if SOFTCAP:
        capped = (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0) * softcap
        if FINITE:
            capped = tl.where(x == float("-inf"), x, capped)
        x = capped
    named = seen
    if FINITE:
        nonfinite = (x < float("inf")) == 0
        named = seen & nonfinite
        seen = seen & (nonfinite == 0)
    return tl.where(seen, x, float("-inf")) * LOG2E, named


@triton.jit
def row_level(
    line_ptr, begin, end, scale, softcap, SOFTCAP: tl.constexpr, FINITE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The largest logit, 0 for none, and one over the sum of exponentials."""
    top, total = float("-inf"), 0.0
    for at in tl.range(0, end, WIDTH):
        x, _ = row_logits(line_ptr, at + tl.arange(0, WIDTH), begin, end, scale, softcap, SOFTCAP, FINITE)
        higher = tl.maximum(top, tl.max(x, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.math.exp2(top - level) + tl.sum(tl.math.exp2(x - level), 0)
        top = higher
    return tl.where(top == float("-inf"), 0.0, top), 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=("q_offset", "q_len", "kv_len", "first_row", "columns", "window", "heads"))
def tile_softmax_kernel(
    scores_ptr, nonfinite_ptr, starts_ptr, lengths_ptr, scale, softcap,
    q_offset, q_len, kv_len, first_row, columns, window, heads,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Scores ``[batch, heads, rows, columns]`` become softmax masses over a row's reachable tiles, in place.

    FlexPrefill's Algorithm 4, of pooled vectors; BFLA's equations 5 to 8. 0 elsewhere. nonfinite: bytes of the same
    shape, or None: tiles of a NaN or infinite score, which then have no mass. One program: one row, in two sweeps.
    """
    FINITE: tl.constexpr = nonfinite_ptr is not None
    bh, r = tl.program_id(1), tl.program_id(0)
    _, length, first = batch_row(bh // heads, starts_ptr, lengths_ptr, q_offset, kv_len)
    tile = floor_div(first, BLOCK) + first_row + r
    high, low = tl.minimum(first + q_len, length), tl.maximum(first, 0)
    live = (tl.minimum((tile + 1) * BLOCK, high) > tl.maximum(tile * BLOCK, low)).to(tl.int32)
    begin, end = span(tile, columns, window, BLOCK, BLOCK, WINDOW)
    end *= live
    row = (bh.to(tl.int64) * tl.num_programs(0) + r) * columns
    line = scores_ptr + row
    level, share = row_level(line, begin, end, scale, softcap, SOFTCAP, FINITE, WIDTH)
    for at in tl.range(0, columns, WIDTH):
        c = at + tl.arange(0, WIDTH)
        x, named = row_logits(line, c, begin, end, scale, softcap, SOFTCAP, FINITE)  # [WIDTH]
        if FINITE:
            tl.store(nonfinite_ptr + row + c, named.to(tl.uint8), mask=c < columns)
        tl.store(line + c, tl.math.exp2(x - level) * share, mask=c < columns)


def tile_softmax(
    call: AttentionCall, scores: Tensor, tile: int, scale: float, softcap: float | None,
    nonfinite: Tensor | None = None, first_row: int = 0,
) -> Tensor:  # fmt: skip
    """Turns scores ``[B, Hq, r, C]``, float32 and contiguous, of the query tiles from `first_row` on into masses.

    scale: factor on the scores, before the softcap. nonfinite: uint8 of the same shape, see `tile_softmax_kernel`.
    """
    geometry, (batch, heads, rows, columns) = call.geometry, scores.shape
    enqueue(tile_softmax_kernel, (rows, batch * heads),
        scores, nonfinite, geometry.starts, geometry.lengths, scale, softcap or 0.0,
        geometry.q_offset, geometry.q_len, geometry.kv_len, first_row, columns, geometry.window or 0, heads,
        BLOCK=tile, WIDTH=512, WINDOW=geometry.window is not None, SOFTCAP=softcap is not None, num_warps=4, **FUSED,
    )  # fmt: skip
    return scores
