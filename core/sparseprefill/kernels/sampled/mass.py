"""Exact attention of sampled query rows, summed by key column and by diagonal, in four launches, none of which waits.

Two passes over all keys: partial LSE by key chunk, merged, then mass by key, in two shares, which the last kernel folds
to columns and diagonals. The papers that sample rows (SampleAttention, MInference, FlexPrefill, SharePrefill) compute
the softmax of a few rows as a matrix; here it is online softmax (Milakov and Gimelshein, 2018), and no matrix is made.

In the two passes a program holds up to ROWS neighbouring rows of one head and goes over one chunk of key positions. In
the second pass ROWS is at most the size of a diagonal bin, so that a key's pairs with those rows fall in two bins at
most: `far` sums those of the farther bin, `near` the others, and sums over runs of keys give columns and diagonals.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.family.chips import Chip, chip
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED, HALVES_ALONE, Settings, block, cdiv, power_of_two
from sparseprefill.kernels.source import Keys, packed, strides
from sparseprefill.kernels.steps import LN2, LOG2E, batch_row, factor, floor_div, load_rows, logits, stored_rows

RUNTIME = ("q_offset", "kv_len", "count", "heads", "kv_group", "samples", "parts", "chunk", "window")
UNALIGNED = ("table_ptr", "k_scale_ptr")
BIG = tl.constexpr(1 << 30)


class Rows(NamedTuple):
    """Sampled rows of a program: sample, batch row, head and the index of the first real key.

    Of each row [BLOCK_R]: number in its sample, index in q, position on the row's grid, and whether it is real.
    """

    sample: Any
    b: Any
    h: Any
    start: Any
    number: Any
    index: Any
    position: Any
    real: Any


@triton.jit
def _rows(
    z, rows_ptr, real_ptr, starts_ptr, q_offset, count, heads, samples, parts, ROWS: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """The `Rows` of program z. They are neighbours, so the last one's index gives all."""
    part = z % parts
    h = z // parts % heads
    sample = z // parts // heads
    b = sample // samples
    start, _, _ = batch_row(b, starts_ptr, None, q_offset, 0)
    row = tl.arange(0, BLOCK_R)
    number = part * ROWS + row
    inside = (row < ROWS) & (number < count)
    place = sample.to(tl.int64) * count
    index = tl.load(rows_ptr + place + count - 1).to(tl.int32) - (count - 1) + number
    real = tl.load(real_ptr + place + number, mask=inside, other=0) != 0  # [BLOCK_R]
    return Rows(sample, b, h, start, number, index, index + q_offset - start, real)


@triton.jit
def _span(rows, begin, chunk, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Among the key positions [begin, begin + chunk): the first that a row sees, the end of those that all rows see
    without a mask, and the end of those that any row sees; the first two in whole steps of BLOCK_N from `begin`."""
    top = tl.max(tl.where(rows.real, rows.position, -1), 0)
    low = tl.min(tl.where(rows.real, rows.position, BIG), 0)
    stop = tl.minimum(begin + chunk, top + 1)
    first = begin
    unmasked = begin
    if WINDOW:
        first += tl.maximum(low - window + 1 - begin, 0) // BLOCK_N * BLOCK_N
        unmasked = first
    else:
        every = tl.min(rows.real.to(tl.int32), 0) > 0
        unmasked += tl.where(every, tl.maximum(tl.minimum(begin + chunk, low + 1) - begin, 0), 0) // BLOCK_N * BLOCK_N
    return first, unmasked, stop


@triton.jit
def _seen(at, position, real, window, WINDOW: tl.constexpr):
    """[keys, rows] flags from positions `at` [keys, 1], `position` and `real` [1, rows], or the other way round."""
    keep = (at <= position) & real
    if WINDOW:
        keep = keep & (position - at < window)
    return keep


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def sampled_lse_kernel(
    q_ptr, k_ptr, table_ptr, k_scale_ptr, rows_ptr, real_ptr, starts_ptr, partial_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    scale, softcap, q_offset, kv_len, count, heads, kv_group, samples, parts, chunk, window,
    ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """First pass. partial ``[samples, heads, chunks, count]``: base-2 LSE of each row over one chunk of keys.

    Online softmax without a value product: running maximum m and sum l of each row. Unmasked steps, of keys that
    all rows see, come first.
    """
    rows = _rows(
        tl.program_id(0), rows_ptr, real_ptr, starts_ptr, q_offset, count, heads, samples, parts, ROWS, BLOCK_R
    )  # fmt: skip
    first, unmasked, stop = _span(rows, tl.program_id(1) * chunk, chunk, window, BLOCK_N, WINDOW)
    q_base = q_ptr + rows.b.to(tl.int64) * stride_qb + rows.h.to(tl.int64) * stride_qh
    k_base = k_ptr + rows.b.to(tl.int64) * stride_kb + (rows.h // kv_group).to(tl.int64) * stride_kh
    q = load_rows(q_base, rows.index, rows.real, stride_qn, D, BLOCK_D)  # [BLOCK_R, BLOCK_D]
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)  # noqa: E741
    k_scale = factor(k_scale_ptr)
    key = tl.arange(0, BLOCK_N)
    for j in tl.range(first, unmasked, BLOCK_N):
        at = j + rows.start + key
        k = stored_rows(
            k_base, at, key >= 0, stride_kn, table_ptr, stride_kb, k_scale, q.dtype, PAGE, D, BLOCK_D
        )  # [BLOCK_N, BLOCK_D]
        if SOFTCAP:
            s = logits(q, k, scale, softcap, SOFTCAP, PRECISION)  # [BLOCK_R, BLOCK_N]
            m_new = tl.maximum(m, tl.max(s, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.math.exp2(s - base[:, None])
        else:
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_R, BLOCK_N]
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.math.exp2(s * scale - base[:, None])
        l = l * tl.math.exp2(m - base) + tl.sum(p, 1)  # noqa: E741
        m = m_new
    for j in tl.range(unmasked, stop, BLOCK_N, num_stages=1):
        at = j + key
        index = at + rows.start
        k = stored_rows(
            k_base, index, index < kv_len, stride_kn, table_ptr, stride_kb, k_scale, q.dtype, PAGE, D, BLOCK_D
        )  # [BLOCK_N, BLOCK_D]
        keep = _seen(at[None, :], rows.position[:, None], rows.real[:, None], window, WINDOW)  # [BLOCK_R, BLOCK_N]
        s = tl.where(keep, logits(q, k, scale, softcap, SOFTCAP, PRECISION), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.math.exp2(m - base) + tl.sum(tl.math.exp2(s - base[:, None]), 1)  # noqa: E741
        m = m_new
    lse = tl.where(m == float("-inf"), float("-inf"), m + tl.math.log2(tl.where(l == 0.0, 1.0, l)))
    mine = (rows.number < count) & (tl.arange(0, BLOCK_R) < ROWS)
    out = (rows.sample * heads + rows.h).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial_ptr + out * count + rows.number, lse, mask=mine)


@triton.jit(do_not_specialize=("count", "chunks", "heads", "samples"))
def sampled_merge_kernel(
    partial_ptr, lse_ptr, count, chunks, heads, samples, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """lse ``[B, heads, samples, count]``, natural log, from the parts of all chunks. One program: some rows of a sample."""
    z = tl.program_id(0)
    number = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)  # noqa: E741
    for first in range(0, chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        where = (z.to(tl.int64) * chunks + chunk)[:, None] * count + number[None, :]
        there = (chunk < chunks)[:, None] & (number < count)[None, :]
        part = tl.load(partial_ptr + where, mask=there, other=float("-inf"))  # [BLOCK_C, BLOCK_R]
        m_new = tl.maximum(m, tl.max(part, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.math.exp2(m - base) + tl.sum(tl.math.exp2(part - base[None, :]), 0)  # noqa: E741
        m = m_new
    lse = tl.where(m == float("-inf"), float("-inf"), (m + tl.math.log2(tl.where(l == 0.0, 1.0, l))) * LN2)
    sample, h = z // heads, z % heads
    out = (((sample // samples) * heads + h) * samples + sample % samples).to(tl.int64)
    tl.store(lse_ptr + out * count + number, lse, mask=number < count)


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
    q_ptr, k_ptr, table_ptr, k_scale_ptr, rows_ptr, real_ptr, starts_ptr, lse_ptr, shares_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    scale, softcap, q_offset, kv_len, count, heads, kv_group, samples, parts, chunk, window,
    SLASH: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Second pass. shares ``[samples, heads, parts, 2, chunks * chunk]``: mass of each key, near and far share.

    Keys are the rows of the product here: sums over sampled rows then stay within a thread but for two shuffles.
    """
    rows = _rows(
        tl.program_id(0), rows_ptr, real_ptr, starts_ptr, q_offset, count, heads, samples, parts, ROWS, BLOCK_R
    )  # fmt: skip
    begin = tl.program_id(1) * chunk
    first, unmasked, stop = _span(rows, begin, chunk, window, BLOCK_N, WINDOW)
    q_base = q_ptr + rows.b.to(tl.int64) * stride_qb + rows.h.to(tl.int64) * stride_qh
    k_base = k_ptr + rows.b.to(tl.int64) * stride_kb + (rows.h // kv_group).to(tl.int64) * stride_kh
    q = load_rows(q_base, rows.index, rows.real, stride_qn, D, BLOCK_D)  # [BLOCK_R, BLOCK_D]
    row = ((rows.b * heads + rows.h) * samples + rows.sample % samples).to(tl.int64) * count + rows.number
    lse = tl.load(lse_ptr + row, mask=rows.real, other=float("inf")) * LOG2E  # [BLOCK_R]
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    near_ptr = shares_ptr + tl.program_id(0).to(tl.int64) * 2 * tl.num_programs(1) * chunk
    far_ptr = near_ptr + tl.num_programs(1).to(tl.int64) * chunk
    origin = tl.min(rows.position, 0)
    k_scale = factor(k_scale_ptr)
    key = tl.arange(0, BLOCK_N)
    zero = tl.zeros([BLOCK_N], tl.float32)
    for j in tl.range(begin, tl.minimum(first, begin + chunk), BLOCK_N):
        tl.store(near_ptr + j + key, zero)
        tl.store(far_ptr + j + key, zero)
    for j in tl.range(first, unmasked, BLOCK_N):
        at = j + key
        k = stored_rows(
            k_base, at + rows.start, key >= 0, stride_kn, table_ptr, stride_kb, k_scale, q.dtype, PAGE, D, BLOCK_D
        )  # [BLOCK_N, BLOCK_D]
        p = tl.math.exp2(logits(k, q, scale, softcap, SOFTCAP, PRECISION) - lse[None, :])  # [BLOCK_N, BLOCK_R]
        _store_shares(near_ptr, far_ptr, at, p, origin - at, SLASH, ROWS, BLOCK_R)
    for j in tl.range(unmasked, stop, BLOCK_N, num_stages=1):
        at = j + key
        index = at + rows.start
        k = stored_rows(
            k_base, index, index < kv_len, stride_kn, table_ptr, stride_kb, k_scale, q.dtype, PAGE, D, BLOCK_D
        )  # [BLOCK_N, BLOCK_D]
        keep = _seen(at[:, None], rows.position[None, :], rows.real[None, :], window, WINDOW)  # [BLOCK_N, BLOCK_R]
        p = tl.math.exp2(logits(k, q, scale, softcap, SOFTCAP, PRECISION) - lse[None, :])  # [BLOCK_N, BLOCK_R]
        _store_shares(near_ptr, far_ptr, at, tl.where(keep, p, 0.0), origin - at, SLASH, ROWS, BLOCK_R)
    rest = unmasked + tl.cdiv(tl.maximum(stop - unmasked, 0), BLOCK_N) * BLOCK_N
    for j in tl.range(rest, begin + chunk, BLOCK_N):
        tl.store(near_ptr + j + key, zero)
        tl.store(far_ptr + j + key, zero)


@triton.jit
def _run_sums(ptr, first, step, size, WIDTH: tl.constexpr, RUN: tl.constexpr, BINS: tl.constexpr):
    """[BINS] sums of RUN entries each, from ``first + bin * step`` on; those outside [0, size) count for nothing."""
    total = tl.zeros([BINS], tl.float32)
    for part in range(0, RUN, WIDTH):
        within = part + tl.arange(0, WIDTH)
        at = (first + tl.arange(0, BINS) * step)[:, None] + within[None, :]
        keep = (at >= 0) & (at < size) & (within < RUN)[None, :]
        total += tl.sum(tl.load(ptr + at, mask=keep, other=0.0), 1)  # of [BINS, WIDTH]
    return total


@triton.jit
def _store_bins(ptr, out, width, low, total, BINS: tl.constexpr):
    bins = low + tl.arange(0, BINS)
    tl.store(ptr + out * width + bins, total, mask=bins < width)


@triton.jit(do_not_specialize=("q_offset", "count", "heads", "samples", "parts", "size", "columns", "slashes"))
def sampled_fold_kernel(
    shares_ptr, rows_ptr, starts_ptr, columns_ptr, slashes_ptr,
    q_offset, count, heads, samples, parts, size, columns, slashes,
    COLUMN: tl.constexpr, COLUMN_WIDTH: tl.constexpr, COLUMN_BINS: tl.constexpr,
    SLASH: tl.constexpr, SLASH_WIDTH: tl.constexpr, SLASH_BINS: tl.constexpr,
    ROWS: tl.constexpr,
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
        _store_bins(columns_ptr, out, columns, low, total, COLUMN_BINS)
    else:
        slash = (tl.program_id(1) - blocks) * SLASH_BINS
        _, _, first_position = batch_row(b, starts_ptr, None, q_offset, 0)
        last = tl.load(rows_ptr + sample.to(tl.int64) * count + count - 1).to(tl.int32) + first_position
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
        _store_bins(slashes_ptr, out, slashes, slash, sums, SLASH_BINS)


PROGRAMS = 1024
"""Programs that a launch should have, so that no multiprocessor waits long for the last."""

SHARES = 512 << 20
"""Bytes of the sums by key that samples of one round may hold."""


@lru_cache
def settings(chip: Chip, block_d: int, itemsize: int) -> Settings:
    """Of both passes; block_m: rows of a program, block_n: keys of a step.

    By a chip's facts, head dimension, rounded up to a power of two, and bytes per element. Two programs share a
    multiprocessor of an H100: one's exponentials overlap the other's products, and three steps of keys fit.
    """
    wide = block_d > 128
    if itemsize == 4:
        return Settings(32, 16 if wide else 32, warps=8, stages=2)
    if block_d > HALVES_ALONE and not chip.large:
        return Settings(32, 32, warps=4, stages=2)
    return Settings(64 if wide else 128, 64, warps=4, stages=3 if chip.deep and not wide else 2)


def sampled_mass(
    call: AttentionCall, rows: Tensor, real: Tensor, slash: int, column: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns ``[B, Hq, S, ceil(Nkv / column)]``, slashes ``[B, Hq, S, ceil(Nkv / slash)]``, lse ``[B, Hq, S, n]``.

    rows: int64 ``[B, S, n]``, real: bool ``[B, S, n]``; see `sparseprefill.statistics.sampled.sampled_mass`. All samples in one
    round of launches, or as many at a time as `SHARES` allows.
    """
    geometry = call.geometry
    chosen = settings(chip(call.q.device), block(call.q.shape[-1]), call.q.element_size())
    part = min(chosen.block_m, slash)
    one = geometry.batch * geometry.heads * cdiv(rows.shape[2], part) * 2 * geometry.kv_len * 4
    size = max(1, SHARES // one)
    if rows.shape[1] <= size:
        return _round(call, rows, real, slash, column, chosen, part)
    rounds = zip(rows.split(size, 1), real.split(size, 1), strict=True)
    found = [_round(call, some, exist, slash, column, chosen, part) for some, exist in rounds]
    columns, slashes, lse = (torch.cat(pieces, 2) for pieces in zip(*found, strict=True))
    return columns, slashes, lse


def _round(
    call: AttentionCall, rows: Tensor, real: Tensor, slash: int, column: int, chosen: Settings, part: int
) -> tuple[Tensor, Tensor, Tensor]:
    geometry = call.geometry
    batch, samples, count = rows.shape
    heads, width, size = geometry.heads, call.q.shape[-1], geometry.kv_len
    q, keys = packed(call.q), Keys.of(call, passes=2)
    rows, real = rows.contiguous(), real.contiguous().view(torch.uint8)
    parts = cdiv(count, part)
    programs = batch * samples * heads * parts
    chunk = _chunk(size, programs, chosen.block_n)
    chunks = cdiv(size, chunk)
    options: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    partial = torch.empty(batch * samples * heads * chunks * count, **options)
    lse = torch.empty(batch, heads, samples, count, **options)
    shares = torch.empty(programs * 2 * chunks * chunk, **options)
    columns = torch.empty(batch, heads, samples, cdiv(size, column), **options)
    slashes = torch.empty(batch, heads, samples, cdiv(size, slash), **options)
    numbers = (
        *strides(q), *keys.strides, call.softmax_scale * LOG2E.value, call.softcap or 0.0,
        geometry.q_offset, size, count, heads, call.group, samples, parts, chunk, geometry.window or 0,
    )  # fmt: skip
    flags = {
        "ROWS": part, "BLOCK_R": block(part), "BLOCK_N": chosen.block_n, "D": width, "BLOCK_D": block(width),
        "WINDOW": geometry.window is not None,
        "SOFTCAP": call.softcap is not None, "PAGE": keys.page, "PRECISION": "ieee",
    }  # fmt: skip
    grid = (programs, chunks)
    enqueue(sampled_lse_kernel, grid,
        q, keys.k, keys.table, keys.scale, rows, real, geometry.starts, partial, *numbers, **flags,
        **chosen.options,
    )  # fmt: skip
    enqueue(sampled_merge_kernel, (batch * samples * heads, cdiv(count, 128)),
        partial, lse, count, chunks, heads, samples, BLOCK_C=32, BLOCK_R=128, **FUSED,
    )  # fmt: skip
    enqueue(sampled_mass_kernel, grid,
        q, keys.k, keys.table, keys.scale, rows, real, geometry.starts, lse, shares, *numbers,
        SLASH=slash, **flags, **chosen.options,
    )  # fmt: skip
    runs = {f"{name}_{key}": x for name, run in (("COLUMN", column), ("SLASH", slash)) for key, x in _run(run)}
    blocks = cdiv(columns.shape[3], runs["COLUMN_BINS"]) + cdiv(slashes.shape[3], runs["SLASH_BINS"])
    enqueue(sampled_fold_kernel, (batch * samples * heads, blocks),
        shares, rows, geometry.starts, columns, slashes,
        geometry.q_offset, count, heads, samples, parts, chunks * chunk, columns.shape[3], slashes.shape[3],
        COLUMN=column, SLASH=slash, **runs, ROWS=part, **FUSED,
    )  # fmt: skip
    return columns, slashes, lse


def _chunk(size: int, programs: int, keys: int) -> int:
    """Keys per program: long, as each begins with loading its rows, but no longer than gives `PROGRAMS` of them."""
    chunk = 2048
    while chunk > 4 * keys and cdiv(size, chunk) * programs < PROGRAMS:
        chunk //= 2
    return chunk


def _run(size: int) -> tuple[tuple[str, int], ...]:
    """Entries of a run that are loaded at once, and runs per program."""
    width = min(power_of_two(size), 1024)
    return ("WIDTH", width), ("BINS", 1024 // width)
