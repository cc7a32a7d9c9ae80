"""Device functions: the Jensen-Shannon distance of block shares, and the blocks that the last queries see."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.steps import batch_row, floor_div

TINY = tl.constexpr(1.1754943508222875e-38)
TWICE_LN2 = tl.constexpr(1.3862943611198906)


@triton.jit
def _term(p, both):
    """``p * ln(2 p / both)``, 0 where there is no mass."""
    return p * tl.log(tl.where(p == 0.0, 1.0, 2.0 * p / both))


@triton.jit
def js_terms(p, q):
    """Each pair of entries' part of twice the Jensen-Shannon divergence, in nats; see `pooled.js_distance`."""
    p, q = tl.where(p < TINY, 0.0, p), tl.where(q < TINY, 0.0, q)
    both = tl.where(p + q == 0.0, 1.0, p + q)
    return _term(p, both) + _term(q, both)


@triton.jit
def js_distance(total):
    """From 0 to 1, or NaN, from the sum of `js_terms`."""
    divergence = total / TWICE_LN2
    kept = tl.sqrt(tl.minimum(tl.maximum(divergence, 0.0), 1.0))
    return tl.where(divergence == divergence, kept, divergence)


@triton.jit
def seen_blocks(
    b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, count, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """First and last block with a key that one of the last `count` real queries sees; last before first for none."""
    _, length, first = batch_row(b, starts_ptr, lengths_ptr, q_offset, kv_len)
    behind = tl.minimum(first + q_len, length)
    begin = tl.maximum(tl.maximum(first, behind - count), 0)
    last = tl.where(behind > begin, behind - 1, -1)
    low = 0
    if WINDOW:
        low = tl.maximum(begin - window + 1, 0) // BLOCK
    return low, floor_div(last, BLOCK)
