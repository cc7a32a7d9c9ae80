"""Two passes of sampled query rows over all keys: partial LSE by key chunk, then mass by key, in two shares.

A program holds up to ROWS neighbouring rows of one head and goes over one chunk of key positions. In the second pass
ROWS is at most the size of a diagonal bin, so that a key's pairs with those rows fall in two bins at most: `far` sums
those of the farther bin, `near` the others, and sums over runs of keys give columns and diagonals alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.steps import LOG2E, floor_div, load_rows, logits, stored_rows

RUNTIME = ("q_offset", "kv_len", "count", "heads", "kv_group", "samples", "parts", "chunk", "window")
UNALIGNED = ("table_ptr",)
BIG = tl.constexpr(1 << 30)


@triton.jit
def _rows(
    z, rows_ptr, real_ptr, starts_ptr, q_offset, count, heads, samples, parts,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Sample, batch row, head, first real key, and of each row: number in its sample, index in q, whether it is real.

    Rows are neighbours, so the last one's index gives all.
    """
    part = z % parts
    h = z // parts % heads
    sample = z // parts // heads
    b = sample // samples
    start = 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + b)
    row = tl.arange(0, BLOCK_R)
    number = part * ROWS + row
    inside = (row < ROWS) & (number < count)
    place = sample.to(tl.int64) * count
    index = tl.load(rows_ptr + place + count - 1).to(tl.int32) - (count - 1) + number
    real = tl.load(real_ptr + place + number, mask=inside, other=0) != 0
    return sample, b, h, start, number, index, real


@triton.jit
def _span(position, real, begin, chunk, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Of the key positions [begin, begin + chunk): the first that a row sees, the end of those that all rows see
    without a mask, and the end of those that any row sees; the first two in whole steps of BLOCK_N from `begin`."""
    top = tl.max(tl.where(real, position, -1), 0)
    low = tl.min(tl.where(real, position, BIG), 0)
    stop = tl.minimum(begin + chunk, top + 1)
    first = begin
    whole = begin
    if WINDOW:
        first += tl.maximum(low - window + 1 - begin, 0) // BLOCK_N * BLOCK_N
        whole = first
    else:
        every = tl.min(real.to(tl.int32), 0) > 0
        whole += tl.where(every, tl.maximum(tl.minimum(begin + chunk, low + 1) - begin, 0), 0) // BLOCK_N * BLOCK_N
    return first, whole, stop


@triton.jit
def _seen(at, position, real, window, WINDOW: tl.constexpr):
    """[keys, rows] flags from positions `at` [keys, 1], `position` and `real` [1, rows], or the other way round."""
    keep = (at <= position) & real
    if WINDOW:
        keep = keep & (position - at < window)
    return keep


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def sampled_lse_kernel(
    q_ptr, k_ptr, table_ptr, rows_ptr, real_ptr, starts_ptr, partial_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    scale, softcap, q_offset, kv_len, count, heads, kv_group, samples, parts, chunk, window,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_STARTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial ``[samples, heads, chunks, count]``: base-2 LSE of each row over one chunk of keys."""
    sample, b, h, start, number, index, real = _rows(
        tl.program_id(0), rows_ptr, real_ptr, starts_ptr, q_offset, count, heads, samples, parts,
        ROWS, BLOCK_R, HAS_STARTS,
    )  # fmt: skip
    position = index + q_offset - start
    first, whole, stop = _span(position, real, tl.program_id(1) * chunk, chunk, window, BLOCK_N, WINDOW)
    q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    k_base = k_ptr + b.to(tl.int64) * stride_kb + (h // kv_group).to(tl.int64) * stride_kh
    q = load_rows(q_base, index, real, stride_qn, D, BLOCK_D)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)  # noqa: E741
    key = tl.arange(0, BLOCK_N)
    for j in tl.range(first, whole, BLOCK_N):
        k = stored_rows(k_base, j + start + key, key >= 0, stride_kn, table_ptr, stride_kb, PAGE, D, BLOCK_D)
        if SOFTCAP:
            s = logits(q, k, scale, softcap, SOFTCAP, PRECISION)
            m_new = tl.maximum(m, tl.max(s, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.math.exp2(s - base[:, None])
        else:
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.math.exp2(s * scale - base[:, None])
        l = l * tl.math.exp2(m - base) + tl.sum(p, 1)  # noqa: E741
        m = m_new
    for j in tl.range(whole, stop, BLOCK_N, num_stages=1):
        at = j + key
        k = stored_rows(k_base, at + start, at + start < kv_len, stride_kn, table_ptr, stride_kb, PAGE, D, BLOCK_D)
        keep = _seen(at[None, :], position[:, None], real[:, None], window, WINDOW)
        s = tl.where(keep, logits(q, k, scale, softcap, SOFTCAP, PRECISION), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.math.exp2(m - base) + tl.sum(tl.math.exp2(s - base[:, None]), 1)  # noqa: E741
        m = m_new
    lse = tl.where(m == float("-inf"), float("-inf"), m + tl.math.log2(tl.where(l == 0.0, 1.0, l)))
    mine = (number < count) & (tl.arange(0, BLOCK_R) < ROWS)
    out = (sample * heads + h).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial_ptr + out * count + number, lse, mask=mine)


@triton.jit
def _store_shares(near_ptr, far_ptr, at, p, distance, SLASH: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Sums of p [keys, rows] over the rows of either diagonal bin; distance: of the keys from the program's row 0."""
    if ROWS == 1:
        tl.store(near_ptr + at, tl.sum(p, 1))
        tl.store(far_ptr + at, tl.zeros_like(distance).to(tl.float32))
    else:
        if SLASH & (SLASH - 1) == 0:
            edge = SLASH - (distance & (SLASH - 1))
        else:
            edge = SLASH - (distance - floor_div(distance, SLASH) * SLASH)
        farther = tl.arange(0, BLOCK_R)[None, :] >= edge[:, None]
        tl.store(near_ptr + at, tl.sum(tl.where(farther, 0.0, p), 1))
        tl.store(far_ptr + at, tl.sum(tl.where(farther, p, 0.0), 1))


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def sampled_mass_kernel(
    q_ptr, k_ptr, table_ptr, rows_ptr, real_ptr, starts_ptr, lse_ptr, shares_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    scale, softcap, q_offset, kv_len, count, heads, kv_group, samples, parts, chunk, window,
    SLASH: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_STARTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """shares ``[samples, heads, parts, 2, chunks * chunk]``: mass of each key position, near and far share.

    Keys are the rows of the product here: sums over sampled rows then stay within a thread but for two shuffles.
    """
    sample, b, h, start, number, index, real = _rows(
        tl.program_id(0), rows_ptr, real_ptr, starts_ptr, q_offset, count, heads, samples, parts,
        ROWS, BLOCK_R, HAS_STARTS,
    )  # fmt: skip
    position = index + q_offset - start
    begin = tl.program_id(1) * chunk
    first, whole, stop = _span(position, real, begin, chunk, window, BLOCK_N, WINDOW)
    q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    k_base = k_ptr + b.to(tl.int64) * stride_kb + (h // kv_group).to(tl.int64) * stride_kh
    q = load_rows(q_base, index, real, stride_qn, D, BLOCK_D)
    row = ((b * heads + h) * samples + sample % samples).to(tl.int64) * count + number
    lse = tl.load(lse_ptr + row, mask=real, other=float("inf")) * LOG2E
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    near_ptr = shares_ptr + tl.program_id(0).to(tl.int64) * 2 * tl.num_programs(1) * chunk
    far_ptr = near_ptr + tl.num_programs(1).to(tl.int64) * chunk
    origin = tl.min(position, 0)
    key = tl.arange(0, BLOCK_N)
    zero = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.range(begin, tl.minimum(first, begin + chunk), BLOCK_N):
        tl.store(near_ptr + j + key, zero)
        tl.store(far_ptr + j + key, zero)
    for j in tl.range(first, whole, BLOCK_N):
        at = j + key
        k = stored_rows(k_base, at + start, key >= 0, stride_kn, table_ptr, stride_kb, PAGE, D, BLOCK_D)
        p = tl.math.exp2(logits(k, q, scale, softcap, SOFTCAP, PRECISION) - lse[None, :])
        _store_shares(near_ptr, far_ptr, at, p, origin - at, SLASH, ROWS, BLOCK_R)
    for j in tl.range(whole, stop, BLOCK_N, num_stages=1):
        at = j + key
        k = stored_rows(k_base, at + start, at + start < kv_len, stride_kn, table_ptr, stride_kb, PAGE, D, BLOCK_D)
        keep = _seen(at[:, None], position[None, :], real[None, :], window, WINDOW)
        p = tl.math.exp2(logits(k, q, scale, softcap, SOFTCAP, PRECISION) - lse[None, :])
        _store_shares(near_ptr, far_ptr, at, tl.where(keep, p, 0.0), origin - at, SLASH, ROWS, BLOCK_R)
    rest = whole + tl.cdiv(tl.maximum(stop - whole, 0), BLOCK_N) * BLOCK_N
    for j in tl.range(rest, begin + chunk, BLOCK_N):
        tl.store(near_ptr + j + key, zero)
        tl.store(far_ptr + j + key, zero)
