"""Maxima of sampled rows by key tile, and which tiles they keep, in two Triton kernels; a third rounds keys to 8 bits.

No logit is stored: of each sampled row and key tile, the largest is. A scale and a softcap leave the largest of some
logits the largest, so products are compared as they come, and only maxima are scaled, capped and exponentiated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from sparseprefill.kernels.steps import LN2, LOG2E, batch_row, factor, floor_div, load_rows, stored_rows

RUNTIME = (
    "q_offset", "q_len", "kv_len", "window", "heads", "kv_group", "first_head", "first_tile", "blocks", "reach",
    "columns",
)  # fmt: skip
UNALIGNED = ("table_ptr", "k_scale_ptr")
BIG = tl.constexpr(1 << 30)
TOP = tl.constexpr(8)
"""Power of two up to which numbers are scaled before they are rounded to e4m3, whose largest is 448."""
FAR = tl.constexpr(100.0)
"""Powers of two by which numbers are scaled, at most."""
LARGEST = tl.constexpr(65504.0)
"""Of float16."""


class Queries(NamedTuple):
    """The queries of a batch row: position of row 0 on the row's grid, its tile, and the positions that hold queries,
    `low` to `high` - 1."""

    first: Any
    tile: Any
    low: Any
    high: Any


class KeySource(NamedTuple):
    """Where a program reads keys: a head's, from position 0 on; table and stride of pages, and the factor on them."""

    ptr: Any
    start: Any
    stride: Any
    table_ptr: Any
    stride_page: Any
    scale: Any


class Sampled(NamedTuple):
    """Sampled rows of a program: their queries, their positions, and the factor that makes products base-2 logits.
    softcap: or None. window: keys that a row sees."""

    q: Any
    position: Any
    scale: Any
    softcap: Any
    window: Any


@triton.jit
def _queries(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, BLOCK: tl.constexpr):
    """start of a batch row among the keys, and its `Queries`."""
    start, length, first = batch_row(b, starts_ptr, lengths_ptr, q_offset, kv_len)
    return start, Queries(first, floor_div(first, BLOCK), tl.maximum(first, 0), tl.minimum(first + q_len, length))


@triton.jit
def _sampled(number, head, queries, PER: tl.constexpr, BLOCK: tl.constexpr, EVERY: tl.constexpr):
    """position, real: of sampled rows by number from the call's first query tile on, for a head of the layer."""
    tile = queries.tile + number // PER
    position = tile * BLOCK + (tile + head) % EVERY + number % PER * EVERY
    return position, (position >= queries.low) & (position < queries.high)


@triton.jit
def _exponent(largest):
    """Powers of two that bring numbers of this magnitude to at most 2^TOP; 0 for 0."""
    power = TOP - tl.math.ceil(tl.math.log2(tl.where(largest > 0.0, largest, 1.0)))
    return tl.minimum(tl.maximum(power, -FAR), FAR)


@triton.jit
def _rounded(x, power):
    """e4m3 of x times 2^power. Only what was infinite lies outside of it then."""
    x = x.to(tl.float32) * tl.math.exp2(power)
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit(
    do_not_specialize=("q_offset", "q_len", "kv_len", "kv_heads", "columns"), do_not_specialize_on_alignment=UNALIGNED
)
def round_keys_kernel(
    rounded_ptr, factors_ptr, k_ptr, table_ptr, k_scale_ptr, starts_ptr, lengths_ptr,
    stride_kb, stride_kh, stride_kn, q_offset, q_len, kv_len, kv_heads, columns,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """rounded: e4m3 ``[B, Hkv, columns * BLOCK, D]``, keys by position, each tile times a power of two of its own.

    factors: float32 ``[B, Hkv, columns]``, the inverse of that. What no query of the call may see is 0. One program:
    one key tile of one head.
    """
    c, bh = tl.program_id(0), tl.program_id(1)
    b, kv = bh // kv_heads, bh % kv_heads
    start, queries = _queries(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, BLOCK)
    k_base = k_ptr + b.to(tl.int64) * stride_kb + kv.to(tl.int64) * stride_kh
    if PAGE > 0:
        k_base = k_ptr + kv.to(tl.int64) * stride_kh
    k_scale = factor(k_scale_ptr)
    key, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    largest = 0.0
    for j in tl.range(0, BLOCK, BLOCK_N):
        at = c * BLOCK + j + key
        there = (j + key < BLOCK) & (at < queries.high)
        k = stored_rows(k_base, at + start, there, stride_kn, table_ptr, stride_kb, k_scale, TYPE, PAGE, D, BLOCK_D)
        largest = tl.maximum(largest, tl.max(tl.abs(k.to(tl.float32))))
    power = _exponent(largest)
    tl.store(factors_ptr + bh.to(tl.int64) * columns + c, tl.math.exp2(-power))
    line = (bh.to(tl.int64) * columns + c) * BLOCK
    for j in tl.range(0, BLOCK, BLOCK_N):
        at = c * BLOCK + j + key
        there = (j + key < BLOCK) & (at < queries.high)
        k = stored_rows(k_base, at + start, there, stride_kn, table_ptr, stride_kb, k_scale, TYPE, PAGE, D, BLOCK_D)
        tl.store(
            rounded_ptr + (line + j + key)[:, None] * D + dims[None, :], _rounded(k, power),
            mask=(j + key < BLOCK)[:, None] & (dims < D)[None, :],
        )  # fmt: skip


@triton.jit
def _tiles(
    first, last, x, keys, line_ptr, factors_ptr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the maxima of the key tiles from `first` to before `last`. x: `Sampled`. keys: `KeySource`.

    MASKED: some row may not see some key; else each sees all, and all are there.
    """
    parts: tl.constexpr = (BLOCK + BLOCK_N - 1) // BLOCK_N
    row, key = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    top = tl.max(x.position, 0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for step in tl.range(first * parts, last * parts):
        tile = step // parts
        inside = step % parts * BLOCK_N + key
        at = tile * BLOCK + inside
        there = tl.full([BLOCK_N], 1, tl.int1)
        if MASKED:
            there = at <= top
            if BLOCK % BLOCK_N != 0:
                there = there & (inside < BLOCK)
        k = stored_rows(
            keys.ptr, at + keys.start, there, keys.stride, keys.table_ptr, keys.stride_page, keys.scale,
            TYPE, PAGE, D, BLOCK_D,
        )  # [BLOCK_N, BLOCK_D]  # fmt: skip
        s = tl.dot(x.q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            seen = (at[None, :] <= x.position[:, None]) & there[None, :]
            if WINDOW:
                seen = seen & (x.position[:, None] - at[None, :] < x.window)
            s = tl.where(seen, s, float("-inf"))
        m = tl.max(s, 1)  # [BLOCK_M]
        if parts > 1:
            m = tl.where(step % parts == 0, m, tl.maximum(m, best))
            best = m
        if step % parts == parts - 1:
            scale = x.scale
            if factors_ptr is not None:
                scale = scale * tl.load(factors_ptr + tile)
            m = m * scale
            if x.softcap is not None:
                m = (2.0 * tl.sigmoid(2.0 * m * LN2 / x.softcap) - 1.0) * x.softcap * LOG2E
            if line_ptr.dtype.element_ty == tl.float16:
                m = tl.minimum(m, LARGEST)
            tl.store(line_ptr + tile.to(tl.int64) * BLOCK_M + row, m.to(line_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=(*RUNTIME, "each"), do_not_specialize_on_alignment=UNALIGNED)
def maxima_kernel(
    maxima_ptr, q_ptr, k_ptr, table_ptr, k_scale_ptr, factors_ptr, starts_ptr, lengths_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    scale, softcap, q_offset, q_len, kv_len, window,
    heads, kv_group, first_head, first_tile, blocks, reach, columns, each,
    BLOCK: tl.constexpr, EVERY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """maxima ``[B, Hq, blocks, reach, BLOCK_M]``: each sampled row's largest logit (base 2) in each key tile it may see.

    Sampled rows are numbered through the query tiles of this launch, from tile `first_tile` of the call on. One program: BLOCK_M of them of one query head, and `each` key tiles; heads that share keys lie side by side, and
    long rows come first. factors_ptr: keys are those of `round_keys_kernel`, by position, and queries are rounded too;
    or None. What stands there for tiles that a row may not see is nothing to be read.
    """
    PER: tl.constexpr = BLOCK // EVERY
    pid = tl.program_id(0)
    member, rest = pid % kv_group, pid // kv_group
    block, pair = blocks - 1 - rest % blocks, rest // blocks
    kv_heads = heads // kv_group
    b, kv = pair // kv_heads, pair % kv_heads
    h = kv * kv_group + member
    start, queries = _queries(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, BLOCK)
    number = block * BLOCK_M + tl.arange(0, BLOCK_M)
    position, real = _sampled(first_tile * PER + number, first_head + h, queries, PER, BLOCK, EVERY)
    top, low = tl.max(tl.where(real, position, -1), 0), tl.min(tl.where(real, position, BIG), 0)
    if top < 0:
        return
    q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    q = load_rows(q_base, position - queries.first, real, stride_qn, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    scales = tl.full([BLOCK_M], 1.0, tl.float32) * scale
    if factors_ptr is None:
        line = k_ptr + kv.to(tl.int64) * stride_kh
        if PAGE == 0:
            line = line + b.to(tl.int64) * stride_kb
        keys = KeySource(line, start, stride_kn, table_ptr, stride_kb, factor(k_scale_ptr))
        factors = None
    else:
        power = _exponent(tl.max(tl.abs(q.to(tl.float32)), 1))
        q = _rounded(q, power[:, None])
        scales = scales * tl.math.exp2(-power)
        # By position: no row of keys begins elsewhere.
        line = k_ptr + b.to(tl.int64) * stride_kb + kv.to(tl.int64) * stride_kh
        keys = KeySource(line, 0, stride_kn, None, stride_kb, None)
        factors = factors_ptr + (b * kv_heads + kv).to(tl.int64) * columns
    # Rows that are none see what the last one sees; nobody reads their maxima.
    position = tl.where(real, position, top)
    x = Sampled(q, position, scales, softcap if SOFTCAP else None, window)
    line_ptr = maxima_ptr + ((b * heads + h).to(tl.int64) * blocks + block) * reach * BLOCK_M
    first, last = tl.program_id(1) * each, tl.minimum(tl.program_id(1) * each + each, top // BLOCK + 1)
    clear, crossing = first, tl.maximum(tl.minimum((low + 1) // BLOCK, last), first)
    if WINDOW:
        first = tl.maximum(first, tl.maximum(low - window + 1, 0) // BLOCK)
        clear = tl.maximum(first, tl.cdiv(tl.maximum(top - window + 1, 0), BLOCK))
        clear = tl.minimum(clear, tl.maximum(last, first))
        _tiles(
            first, clear, x, keys, line_ptr, factors,
            True, True, BLOCK, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE, TYPE, PRECISION,
        )  # fmt: skip
        crossing = tl.maximum(crossing, clear)
    if BLOCK % BLOCK_N == 0:
        _tiles(
            clear, crossing, x, keys, line_ptr, factors,
            False, False, BLOCK, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE, TYPE, PRECISION,
        )  # fmt: skip
    else:
        crossing = clear
    _tiles(
        crossing, last, x, keys, line_ptr, factors,
        True, WINDOW, BLOCK, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE, TYPE, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=(*RUNTIME, "rows"), do_not_specialize_on_alignment=("sinks_ptr",))
def choose_kernel(
    chosen_ptr, maxima_ptr, sinks_ptr, starts_ptr, lengths_ptr, least, q_offset, q_len, kv_len, window,
    heads, kv_group, first_head, first_tile, blocks, reach, rows, columns,
    BLOCK: tl.constexpr, EVERY: tl.constexpr, BLOCK_M: tl.constexpr, MEMBERS: tl.constexpr, UNION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """chosen ``[B, h, rows, columns]``: which key tiles have a share of 2^least or more for one row of a query tile.

    Of a float type: the largest share instead. h: query heads, or with UNION KV heads. One program: one query tile, of
    the MEMBERS heads (a power of two, not all of which need be there) that share an entry; their rows, ROWS of each (a
    power of two), lie side by side.
    """
    PER: tl.constexpr = BLOCK // EVERY
    tile, unit = tl.program_id(0), tl.program_id(1)
    units = heads // kv_group if UNION else heads
    b, u = unit // units, unit % units
    line = tl.arange(0, MEMBERS * ROWS)
    member, j = line // ROWS, line % ROWS
    h = u * kv_group + member if UNION else u + member
    real = j < PER
    if UNION:
        real = real & (member < kv_group)
    _, queries = _queries(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, BLOCK)
    number = tile * PER + j
    position, there = _sampled(first_tile * PER + number, first_head + h, queries, PER, BLOCK, EVERY)
    real = real & there
    top, low = tl.max(tl.where(real, position, -1), 0), tl.min(tl.where(real, position, BIG), 0)
    begin, end = 0, top // BLOCK + 1
    own = tl.zeros([MEMBERS * ROWS], tl.int32)
    if top < 0:
        end = 0
    if WINDOW:
        own = tl.maximum(position - window + 1, 0) // BLOCK
        begin = tl.minimum(tl.maximum(low - window + 1, 0) // BLOCK, end) // COLUMNS * COLUMNS
    source = ((b * heads + h).to(tl.int64) * blocks + number // BLOCK_M) * reach * BLOCK_M + number % BLOCK_M
    level, total = tl.full([MEMBERS * ROWS], float("-inf"), tl.float32), tl.zeros([MEMBERS * ROWS], tl.float32)
    if sinks_ptr is not None:
        level = tl.load(sinks_ptr + h, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
        total = tl.where(level == float("-inf"), 0.0, 1.0)
    for at in tl.range(begin, end, COLUMNS):
        c = at + tl.arange(0, COLUMNS)
        seen = real[:, None] & (c < end)[None, :] & (c[None, :] >= own[:, None])
        m = tl.load(maxima_ptr + source[:, None] + c[None, :] * BLOCK_M, mask=seen, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(level, tl.max(m, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.math.exp2(level - base) + tl.sum(tl.math.exp2(m - base[:, None]), 1)
        level = higher
    lse = tl.where(total > 0.0, level + tl.math.log2(tl.where(total > 0.0, total, 1.0)), 0.0)
    out = chosen_ptr + (unit.to(tl.int64) * rows + first_tile + tile) * columns
    for at in tl.range(0, columns, COLUMNS):
        c = at + tl.arange(0, COLUMNS)
        seen = real[:, None] & (c < end)[None, :] & (c[None, :] >= own[:, None])
        m = tl.load(maxima_ptr + source[:, None] + c[None, :] * BLOCK_M, mask=seen, other=float("-inf")).to(tl.float32)
        weight = m - lse[:, None]
        if chosen_ptr.dtype.element_ty == tl.float32:
            found = tl.math.exp2(tl.max(weight, 0))
        else:
            # What is no number is not known to be small.
            found = tl.max((seen & ((weight >= least) | (weight != weight))).to(tl.int32), 0).to(tl.int8)
        tl.store(out + c, found.to(chosen_ptr.dtype.element_ty), mask=c < columns)
