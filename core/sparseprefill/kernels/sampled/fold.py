"""What follows the passes of sampled rows: the LSE of all chunks, and mass by column and diagonal from that by key."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.steps import LN2


@triton.jit(do_not_specialize=("count", "chunks", "heads", "samples"))
def sampled_merge_kernel(
    partial_ptr, lse_ptr, count, chunks, heads, samples, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """lse ``[B, heads, samples, count]``, natural log, from the parts of all chunks."""
    z = tl.program_id(0)
    number = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)  # noqa: E741
    for first in range(0, chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        where = (z.to(tl.int64) * chunks + chunk)[:, None] * count + number[None, :]
        there = (chunk < chunks)[:, None] & (number < count)[None, :]
        part = tl.load(partial_ptr + where, mask=there, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(part, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.math.exp2(m - base) + tl.sum(tl.math.exp2(part - base[None, :]), 0)  # noqa: E741
        m = m_new
    lse = tl.where(m == float("-inf"), float("-inf"), (m + tl.math.log2(tl.where(l == 0.0, 1.0, l))) * LN2)
    sample, h = z // heads, z % heads
    out = (((sample // samples) * heads + h) * samples + sample % samples).to(tl.int64)
    tl.store(lse_ptr + out * count + number, lse, mask=number < count)


@triton.jit
def _run_sums(ptr, first, step, size, WIDTH: tl.constexpr, RUN: tl.constexpr, BINS: tl.constexpr):
    """[BINS] sums of RUN entries each, from ``first + bin * step`` on; those outside [0, size) count for nothing."""
    total = tl.zeros([BINS], tl.float32)
    for part in range(0, RUN, WIDTH):
        within = part + tl.arange(0, WIDTH)
        at = (first + tl.arange(0, BINS) * step)[:, None] + within[None, :]
        keep = (at >= 0) & (at < size) & (within < RUN)[None, :]
        total += tl.sum(tl.load(ptr + at, mask=keep, other=0.0), 1)
    return total


@triton.jit
def _store(ptr, out, width, low, total, BINS: tl.constexpr):
    bins = low + tl.arange(0, BINS)
    tl.store(ptr + out * width + bins, total, mask=bins < width)


@triton.jit(do_not_specialize=("q_offset", "count", "heads", "samples", "parts", "size", "columns", "slashes"))
def sampled_fold_kernel(
    shares_ptr, rows_ptr, starts_ptr, columns_ptr, slashes_ptr,
    q_offset, count, heads, samples, parts, size, columns, slashes,
    COLUMN: tl.constexpr, COLUMN_WIDTH: tl.constexpr, COLUMN_BINS: tl.constexpr,
    SLASH: tl.constexpr, SLASH_WIDTH: tl.constexpr, SLASH_BINS: tl.constexpr,
    ROWS: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """columns ``[B, heads, samples, columns]``, slashes alike; from shares ``[samples, heads, parts, 2, size]``.

    The first programs of an axis sum columns, the others slashes. The distance bin of a key's near share is that of
    the program's first row in the pass before; its far share belongs to the next bin.
    """
    sample, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    b = sample // samples
    out = ((b * heads + h) * samples + sample % samples).to(tl.int64)
    base = shares_ptr + tl.program_id(0).to(tl.int64) * parts * 2 * size
    blocks = tl.cdiv(columns, COLUMN_BINS)
    if tl.program_id(1) < blocks:
        low = tl.program_id(1) * COLUMN_BINS
        total = tl.zeros([COLUMN_BINS], tl.float32)
        for _ in range(parts * 2):
            total += _run_sums(base, low * COLUMN, COLUMN, size, COLUMN_WIDTH, COLUMN, COLUMN_BINS)
            base += size
        _store(columns_ptr, out, columns, low, total, COLUMN_BINS)
    else:
        slash = (tl.program_id(1) - blocks) * SLASH_BINS
        start = 0
        if HAS_STARTS:
            start = tl.load(starts_ptr + b)
        last = tl.load(rows_ptr + sample.to(tl.int64) * count + count - 1).to(tl.int32) + q_offset - start
        sums = tl.zeros([SLASH_BINS], tl.float32)
        # Keys of the near share in bin s end at the distance s * SLASH from the part's first row.
        first = last - (count - 1) - (slash + 1) * SLASH + 1
        for _ in range(parts):
            sums += _run_sums(base, first, -SLASH, size, SLASH_WIDTH, SLASH, SLASH_BINS)
            base += size
            if ROWS > 1:
                sums += _run_sums(base, first + SLASH, -SLASH, size, SLASH_WIDTH, SLASH, SLASH_BINS)
            base += size
            first += ROWS
        _store(slashes_ptr, out, slashes, slash, sums, SLASH_BINS)
