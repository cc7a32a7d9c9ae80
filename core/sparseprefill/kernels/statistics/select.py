"""Top mass of a row by bisection on the bits of its scores: one launch, no sort, no matrix beside the answer.

Non-negative floats order as their bits do. A program holds a row and searches the least value that is kept; each probe
sums what lies above it. Scores count as whole numbers of the row's unit (`units` in `sparseprefill.statistics.select`), in two
halves of 19 bits that float32 adds up exactly, so no order of summation changes the answer: it is the plain-PyTorch
path's, entry by entry.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED

SIZES = ((32, 32, 1, 144), (16, 256, 8, 128))
"""(entries of a thread, threads, warps, cap on registers) of a program that holds its row, for rows that fit."""
STREAM = (16, 512, 16, None)
"""The same for longer rows, read piece by piece for each probe. More than 32 entries would pass float32's 24 bits."""
HALF = tl.constexpr(19)
MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken away again, it rounds to the nearest whole number, ties to even."""
INFINITE = tl.constexpr(0x7F800000)
LAST = tl.constexpr(0x7FFFFFFF)
LARGE = tl.constexpr(2.0**62)
"""More units than rows of 2^24 entries have, and what int64 still holds."""


@triton.jit
def _load(ptr, at, columns):
    """float32: NaN, negative numbers and what lies behind the row are 0."""
    return tl.maximum(tl.load(ptr + at, mask=at < columns, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _bits(x):
    return (x + 0.0).to(tl.int32, bitcast=True)


@triton.jit
def _scale(top):
    """The power of two by which scores are multiplied, so that their whole numbers are the upper halves."""
    exponent = tl.maximum(top >> 23, 27)
    return ((272 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x, scale):
    """(upper, lower) float32 whole numbers: x in units, rounded to nearest, is upper * 2^19 + lower."""
    scaled = x * scale
    upper = (scaled + MAGIC) - MAGIC
    return upper, ((scaled - upper) * 524288.0 + MAGIC) - MAGIC


@triton.jit
def _total(upper, lower):
    """int64: the sum of the halves' sums; of an infinity, which has no whole number, at least 0."""
    return tl.maximum((tl.sum(upper.to(tl.int64), 0) << HALF) + tl.sum(lower.to(tl.int64), 0), 0)


@triton.jit
def _bound(total, top, share_bits):
    """int64: an entry is kept where the sum before it is below. 0 for a row with an infinity."""
    share = share_bits.to(tl.int64).to(tl.float64, bitcast=True)
    bound = tl.ceil(total.to(tl.float64) * share).to(tl.int64)
    return tl.where(top >= INFINITE, 0, bound)


@triton.jit
def _within(mass, count, bound, least, most, BOUNDED: tl.constexpr):
    """True if an entry is kept that has this mass and this many entries before it."""
    keep = mass < bound
    if BOUNDED:
        keep = (count < most) & (keep | (count < least))
    return keep


@triton.jit
def _ties(mass, count, value, scale, bound, least, most, BOUNDED: tl.constexpr):
    """Number of entries of the least value that are kept, by mass and count of those above."""
    upper, lower = _halves(value, scale)
    unit = (upper.to(tl.int64) << HALF) + lower.to(tl.int64)
    room = tl.where(bound > 0, tl.maximum(bound - mass, 0), 0)
    ties = tl.where(unit > 0, (room + unit - 1) // tl.maximum(unit, 1), tl.where(room > 0, LAST, 0))
    if BOUNDED:
        ties = tl.minimum(most - count, tl.maximum(least - count, ties))
    return tl.minimum(ties, LAST).to(tl.int32)


@triton.jit
def _store(keep_ptr, x, at, value, ties, columns):
    """Keeps what is above `value`, and the first `ties` entries equal to it; returns how many of those are left."""
    tie = (x == value).to(tl.int32)
    by_row = tl.sum(tie, 1)
    found = tl.sum(by_row, 0)
    if found <= ties:
        tl.store(keep_ptr + at, x >= value, mask=at < columns)
    else:
        rank = tl.cumsum(tie, 1) + (tl.cumsum(by_row, 0) - by_row)[:, None]
        tl.store(keep_ptr + at, (x > value) | ((x == value) & (rank <= ties)), mask=at < columns)
    return tl.maximum(ties - found, 0)


@triton.jit(do_not_specialize=("scores_ptr", "keep_ptr", "share_bits", "least", "most", "columns"))
def top_mass_rows_kernel(
    scores_ptr, keep_ptr, share_bits, least, most, columns, BOUNDED: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """keep ``[rows, columns]``: the fewest entries of a row that reach a share of its mass, as `top_mass` says (ours).

    Bisection on the bits of the least value kept. One program: one row, in registers.
    """
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, N)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = _load(scores_ptr + row, at, columns)  # [N, WIDTH]
    top = _bits(tl.max(tl.max(x, 0), 0))
    scale = _scale(top)
    upper, lower = _halves(x, scale)
    bound = _bound(_total(tl.sum(upper, 0), tl.sum(lower, 0)), top, share_bits)
    mass, count = bound * 0, 0
    some = _within(mass, count, bound, least, most, BOUNDED)
    # Up to `low` too much lies above a value for it to be kept, from `high` on not. Both step to entries of the row.
    low, high = tl.where(some, -1, top - 1), top
    while high - low > 1:
        probe = low + (high - low) // 2
        value = probe.to(tl.float32, bitcast=True)
        above = (x > value).to(tl.float32)
        probe_mass = _total(tl.sum(above * upper, 0), tl.sum(above * lower, 0))
        probe_count = 0
        if BOUNDED:
            probe_count = tl.sum(tl.sum(above, 0).to(tl.int32), 0)
        if _within(probe_mass, probe_count, bound, least, most, BOUNDED):
            high = _bits(tl.max(tl.max(tl.where(x <= value, x, 0.0), 0), 0))
            mass, count = probe_mass, probe_count
        else:
            # Compared with another number, so that no mask of the row is kept for both branches.
            behind = (probe + 1).to(tl.float32, bitcast=True)
            low = _bits(tl.min(tl.min(tl.where(x >= behind, x, float("inf")), 0), 0)) - 1
    value = high.to(tl.float32, bitcast=True)
    ties = tl.where(some, _ties(mass, count, value, scale, bound, least, most, BOUNDED), 0)
    _store(keep_ptr + row, x, at, value, ties, columns)


@triton.jit
def _above(total, count, x, value, BOUNDED: tl.constexpr):
    """total, count [WIDTH] with the entries of x [N, WIDTH] above a value."""
    above = (x > value).to(tl.float32)
    if BOUNDED:
        count += tl.sum(above, 0).to(tl.int32)
    return total + tl.sum(above * x, 0), count


@triton.jit
def _mass_above(scores_ptr, one, two, three, slot, columns, BOUNDED: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Sum in float32 and number of a row's entries above each of three values."""
    a, b, c = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    i, j, k = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
    whole = columns // (N * WIDTH) * (N * WIDTH)
    for first in range(0, whole, N * WIDTH):
        x = tl.maximum(tl.load(scores_ptr + first + slot).to(tl.float32), 0.0)  # [N, WIDTH], NaN as 0
        a, i = _above(a, i, x, one, BOUNDED)
        b, j = _above(b, j, x, two, BOUNDED)
        c, k = _above(c, k, x, three, BOUNDED)
    if whole < columns:
        x = _load(scores_ptr, whole + slot, columns)
        a, i = _above(a, i, x, one, BOUNDED)
        b, j = _above(b, j, x, two, BOUNDED)
        c, k = _above(c, k, x, three, BOUNDED)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(i, 0), tl.sum(j, 0), tl.sum(k, 0)


@triton.jit
def _narrowed(low, high, probe, mass, count, unit, margin, bound, least, most, BOUNDED: tl.constexpr):
    """low, high once it is known what lies above `probe`, up to `margin` of its mass; where that does not tell on which
    side of the bound it lies, as they were."""
    mass = mass.to(tl.float64)
    under = tl.minimum((mass - margin) * unit, LARGE).to(tl.int64)
    over = tl.minimum((mass + margin) * unit, LARGE).to(tl.int64) + 1
    high = tl.where(_within(over, count, bound, least, most, BOUNDED), tl.minimum(high, probe), high)
    low = tl.where(_within(under, count, bound, least, most, BOUNDED), low, tl.maximum(low, probe))
    return low, high


@triton.jit(do_not_specialize=("scores_ptr", "keep_ptr", "share_bits", "least", "most", "columns"))
def top_mass_stream_kernel(
    scores_ptr, keep_ptr, share_bits, least, most, columns, BOUNDED: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The fewest entries of a long row that reach a mass. One program: a row, read again for each probe (mostly L2).

    Sums in whole numbers take many instructions, so float32 ones narrow the search first, three values at a time, as far
    as their rounding allows. A few exact ones then end it.
    """
    row = tl.program_id(0).to(tl.int64) * columns
    scores_ptr += row
    slot = tl.arange(0, N)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    highest = tl.zeros([WIDTH], tl.float32)
    for first in range(0, columns, N * WIDTH):
        highest = tl.maximum(highest, tl.max(_load(scores_ptr, first + slot, columns), 0))
    top = _bits(tl.max(highest, 0))
    scale = _scale(top)
    uppers, lowers = tl.zeros([WIDTH], tl.int64), tl.zeros([WIDTH], tl.int64)
    for first in range(0, columns, N * WIDTH):
        upper, lower = _halves(_load(scores_ptr, first + slot, columns), scale)
        uppers += tl.sum(upper, 0).to(tl.int64)
        lowers += tl.sum(lower, 0).to(tl.int64)
    total = _total(uppers, lowers)
    bound = _bound(total, top, share_bits)
    mass, count = bound * 0, 0
    some = _within(mass, count, bound, least, most, BOUNDED)
    low, high = tl.where(some, -1, top - 1), top
    # A thread adds N numbers and one for each piece of the row, the rest of the sum is a tree; each entry may be half a
    # unit off as well. Twice that, since these are estimates.
    unit = scale.to(tl.float64) * 524288.0
    margin = 2.0 * (total.to(tl.float64) * ((columns // (N * WIDTH) + N + 16) * 5.97e-8) + columns * 0.5) / unit
    wide = tl.where((top < INFINITE) & (total.to(tl.float64) < 1e38 * unit), -1, high - low)  # else float32 overflows
    while (high - low > 4) & (wide != high - low):
        wide = high - low
        step = wide // 4
        one, two, three = low + step, low + 2 * step, low + 3 * step
        a, b, c, i, j, k = _mass_above(
            scores_ptr, one.to(tl.float32, bitcast=True), two.to(tl.float32, bitcast=True),
            three.to(tl.float32, bitcast=True), slot, columns, BOUNDED, N, WIDTH,
        )  # fmt: skip
        low, high = _narrowed(low, high, one, a, i, unit, margin, bound, least, most, BOUNDED)
        low, high = _narrowed(low, high, two, b, j, unit, margin, bound, least, most, BOUNDED)
        low, high = _narrowed(low, high, three, c, k, unit, margin, bound, least, most, BOUNDED)
    fresh = high < top  # what lies above `high` is not known yet
    while fresh | (high - low > 1):
        probe = tl.where(fresh, high, low + (high - low) // 2)
        fresh = low > high
        value = probe.to(tl.float32, bitcast=True)
        uppers, lowers = tl.zeros([WIDTH], tl.int64), tl.zeros([WIDTH], tl.int64)
        counts = tl.zeros([WIDTH], tl.int32)
        before, behind = tl.zeros([WIDTH], tl.float32), tl.full([WIDTH], float("inf"), tl.float32)
        for first in range(0, columns, N * WIDTH):
            x = _load(scores_ptr, first + slot, columns)
            upper, lower = _halves(x, scale)
            above = (x > value).to(tl.float32)
            uppers += tl.sum(above * upper, 0).to(tl.int64)
            lowers += tl.sum(above * lower, 0).to(tl.int64)
            if BOUNDED:
                counts += tl.sum(above, 0).to(tl.int32)
            before = tl.maximum(before, tl.max(tl.where(x <= value, x, 0.0), 0))
            behind = tl.minimum(behind, tl.min(tl.where(x <= value, float("inf"), x), 0))
        probe_mass, probe_count = _total(uppers, lowers), tl.sum(counts, 0)
        if _within(probe_mass, probe_count, bound, least, most, BOUNDED):
            high = _bits(tl.max(before, 0))
            mass, count = probe_mass, probe_count
        else:
            low = _bits(tl.min(behind, 0)) - 1
    value = high.to(tl.float32, bitcast=True)
    ties = tl.where(some, _ties(mass, count, value, scale, bound, least, most, BOUNDED), 0)
    for first in range(0, columns, N * WIDTH):
        x = _load(scores_ptr, first + slot, columns)
        ties = _store(keep_ptr + row, x, first + slot, value, ties, columns)


def top_mass_fwd(scores: Tensor, share: float, least: int, most: int | None) -> Tensor:
    """See `selection.top_mass`, for a share below 1 and scores of at most 32 bits. One launch."""
    scores = scores.contiguous()
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    columns = scores.shape[-1]
    if keep.numel() == 0:
        return keep
    # As bits, since Triton takes Python's floats for float32; 0 would be an integer of another type than all others.
    (share_bits,) = struct.unpack("<q", struct.pack("<d", share if share > 0 else -1.0))
    last = LAST.value
    bounds = (min(least, last), last if most is None else min(most, last))
    fits = next((size for size in SIZES if columns <= size[0] * size[1]), None)
    kernel = top_mass_stream_kernel if fits is None else top_mass_rows_kernel
    number, width, warps, registers = STREAM if fits is None else fits
    enqueue(kernel, (keep.numel() // columns,),
        scores, keep, share_bits, *bounds, columns,
        BOUNDED=least > 0 or most is not None, N=number, WIDTH=width, num_warps=warps, maxnreg=registers, **FUSED,
    )  # fmt: skip
    return keep
