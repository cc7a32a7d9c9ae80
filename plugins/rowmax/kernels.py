"""Maxima of sampled rows by column, and which columns they keep, in two Triton kernels; a third rounds keys to 8 bits.

A column is a key tile, or a part of one. No logit is stored: of each sampled row and column, the largest is. A scale and a softcap leave the largest of some
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
HOPPER_TILE = 128
"""Tokens of the tiles that `hopper.hopper_maxima_kernel` serves."""
NARROWEST = 16
"""Keys of the columns that it serves, at least."""
BIG = tl.constexpr(1 << 30)
NORM = tl.constexpr(240.0)
"""Norm up to which rows are scaled before they are rounded to e4m3, which adds a 16th at most: their products stay below
float16's 65,504, and their elements below e4m3's 448."""
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
    """Source of a program's keys: a head's, from position 0 on; table and stride of pages, and the factor on them."""

    ptr: Any
    start: Any
    stride: Any
    table_ptr: Any
    stride_page: Any
    scale: Any


class Sampled(NamedTuple):
    """Sampled rows of a program: their queries, their positions, where their maxima go, and the factor that makes
    products base-2 logits. softcap: or None. window: keys that a row sees."""

    q: Any
    position: Any
    place: Any
    scale: Any
    softcap: Any
    window: Any


@triton.jit
def _queries(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, BLOCK: tl.constexpr):
    """start of a batch row among the keys, and its `Queries`."""
    start, length, first = batch_row(b, starts_ptr, lengths_ptr, q_offset, kv_len)
    return start, Queries(first, floor_div(first, BLOCK), tl.maximum(first, 0), tl.minimum(first + q_len, length))


@triton.jit
def _sampled(
    number, head, queries, PER: tl.constexpr, BLOCK: tl.constexpr, EVERY: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """position, real: of sampled rows (see `maxima.Sampling`) by number from the call's first query tile on, for a head of the layer."""
    tile = queries.tile + number // PER
    position = tile * BLOCK + (tile + head * SHIFT) % EVERY + number % PER * EVERY
    return position, (position >= queries.low) & (position < queries.high)


@triton.jit
def _norm(x):
    """Norm of each row of x ``[rows, D]``. Squares of float16 and bfloat16 may be too large, so x is scaled first."""
    largest = tl.max(tl.abs(x), 1)
    power = tl.math.floor(tl.math.log2(tl.where(largest > 0.0, largest, 1.0)))
    power = tl.minimum(tl.maximum(power, -FAR), FAR)
    part = x * tl.math.exp2(-power)[:, None]
    return tl.math.exp2(power) * tl.math.sqrt(tl.sum(part * part, 1))


@triton.jit
def _exponent(norm):
    """Powers of two that bring rows of this norm to more than NORM / 2 and at most NORM."""
    power = tl.math.floor(tl.math.log2(1.0 / tl.where(norm > 0.0, norm, 1.0) * NORM))
    return tl.minimum(tl.maximum(power, -FAR), FAR)


@triton.jit
def _rounded(x, power):
    """e4m3 of x times 2^power. Only what was infinite lies outside of it then."""
    x = x.to(tl.float32) * tl.math.exp2(power)
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def _tile_keys(
    keys, tile, j, high,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D]: keys of a tile from number j on; 0 from position `high` on."""
    number = j + tl.arange(0, BLOCK_N)
    at = tile * BLOCK + number
    there = (number < BLOCK) & (at < high)
    return stored_rows(
        keys.ptr, at + keys.start, there, keys.stride, keys.table_ptr, keys.stride_page, keys.scale, TYPE, PAGE, D, BLOCK_D
    )  # fmt: skip


@triton.jit
def _store_rounded(
    line_ptr, k, power, j, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Keys of a tile from number j on in e4m3, to where the tile begins."""
    number, dims = j + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    there = (number < BLOCK)[:, None] & (dims < D)[None, :]
    tl.store(line_ptr + number[:, None] * D + dims[None, :], _rounded(k, power), mask=there)


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
    keys = KeySource(k_base, start, stride_kn, table_ptr, stride_kb, factor(k_scale_ptr))
    place = bh.to(tl.int64) * columns + c
    rounded_ptr += place * BLOCK * D
    if BLOCK_N == BLOCK:  # the tile waits in registers for its largest norm
        k = _tile_keys(keys, c, 0, queries.high, BLOCK, BLOCK_N, D, BLOCK_D, PAGE, TYPE)
        power = _exponent(tl.max(_norm(k.to(tl.float32))))
        _store_rounded(rounded_ptr, k, power, 0, BLOCK, BLOCK_N, D, BLOCK_D)
    else:
        largest = 0.0
        for j in tl.range(0, BLOCK, BLOCK_N):
            k = _tile_keys(keys, c, j, queries.high, BLOCK, BLOCK_N, D, BLOCK_D, PAGE, TYPE)
            largest = tl.maximum(largest, tl.max(_norm(k.to(tl.float32))))
        power = _exponent(largest)
        for j in tl.range(0, BLOCK, BLOCK_N):
            k = _tile_keys(keys, c, j, queries.high, BLOCK, BLOCK_N, D, BLOCK_D, PAGE, TYPE)
            _store_rounded(rounded_ptr, k, power, j, BLOCK, BLOCK_N, D, BLOCK_D)
    tl.store(factors_ptr + place, tl.math.exp2(-power))


@triton.jit
def _larger(a, b):
    """The larger of float16 numbers, two at a time."""
    return tl.inline_asm_elementwise(
        "max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
    )  # fmt: skip


@triton.jit
def _row_max(s, PACKED: tl.constexpr):
    """Largest of each row of s ``[M, N]``."""
    if not PACKED:
        return tl.max(s, 1)
    M: tl.constexpr = s.shape[0]
    N: tl.constexpr = s.shape[1]
    a, b = tl.split(tl.permute(tl.reshape(s, [M, 2, N // 2]), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(_larger(a, b), [M, 2, N // 4]), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(_larger(a, b), [M, 2, N // 8]), (0, 2, 1)))
    return tl.max(_larger(a, b), 1)


@triton.jit
def _column_max(s, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """[M, N / WIDTH]: largest of each row of s ``[M, N]`` in each column of WIDTH keys."""
    M: tl.constexpr = s.shape[0]
    COLUMNS: tl.constexpr = s.shape[1] // WIDTH
    if not PACKED or WIDTH < 4:  # what follows a return would be compiled, too
        m = tl.max(tl.reshape(s, [M, COLUMNS, WIDTH]), 2)
    else:
        a, b = tl.split(tl.permute(tl.reshape(s, [M, COLUMNS, 2, WIDTH // 2]), (0, 1, 3, 2)))
        a, b = tl.split(tl.permute(tl.reshape(_larger(a, b), [M, COLUMNS, 2, WIDTH // 4]), (0, 1, 3, 2)))
        m = tl.max(_larger(a, b), 2)
    return m


@triton.jit
def _joined(level, total, m):
    """level, total with one more number: their logarithm is ``level + log2(total)``, -inf as long as total is 0."""
    less = tl.math.exp2(tl.where(m == level, 0.0, -tl.abs(m - level)))
    # A row that has seen nothing yet stays at 0: what is -inf is no key.
    return tl.maximum(level, m), tl.where(
        m > level, total * less + 1.0, total + tl.where(m == float("-inf"), 0.0, less)
    )


@triton.jit
def _all_joined(level, total, m):
    """level, total of each row with the numbers of m ``[M, N]``, as `_joined`."""
    top = tl.maximum(level, tl.max(m, 1))
    at = tl.where(top == float("-inf"), 0.0, top)
    before = tl.where(level == at, 1.0, tl.math.exp2(level - at))  # also of infinity
    more = tl.where(m == at[:, None], 1.0, tl.math.exp2(m - at[:, None]))
    return top, total * before + tl.sum(more, 1)


@triton.jit
def _logits(m, scale, softcap):
    """Base-2 logits of products m."""
    m = m * scale
    if softcap is not None:
        capped = (2.0 * tl.sigmoid(2.0 * m * LN2 / softcap) - 1.0) * softcap * LOG2E
        m = tl.where(m == float("-inf"), m, capped)  # what a row does not see is no number to cap
    return m


@triton.jit
def _left(m, level, total, x, line_ptr, factors_ptr, tile, column, PER: tl.constexpr):
    """Stores the largest products m ``[M]`` of a column as logits; level, total with them."""
    scale = x.scale
    if factors_ptr is not None:
        scale = scale * tl.load(factors_ptr + tile)
    m = _logits(m, scale, x.softcap)
    if line_ptr.dtype.element_ty == tl.float16:
        m = tl.minimum(m, LARGEST)
    stored = m.to(line_ptr.dtype.element_ty)
    tl.store(line_ptr + x.place + column * PER, stored)
    return _joined(level, total, stored.to(tl.float32))


@triton.jit
def _all_left(m, level, total, x, line_ptr, factors_ptr, tile, first, behind, PER: tl.constexpr):
    """Stores the largest products m ``[M, N]`` of columns from `first` to before `behind`; level, total with them."""
    scale = x.scale
    if factors_ptr is not None:
        scale = scale * tl.load(factors_ptr + tile)
    m = _logits(m, scale[:, None], x.softcap)
    if line_ptr.dtype.element_ty == tl.float16:
        m = tl.minimum(m, LARGEST)
    stored = m.to(line_ptr.dtype.element_ty)
    column = (first + tl.arange(0, m.shape[1]))[None, :]
    tl.store(line_ptr + x.place[:, None] + column * PER, stored, mask=column < behind)
    return _all_joined(level, total, stored.to(tl.float32))


@triton.jit
def _tiles(
    first, last, level, total, x, keys, line_ptr, factors_ptr, PER: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Stores the maxima of the key tiles from `first` to before `last`. x: `Sampled`. keys: `KeySource`.

    Returns level, total: a row's largest maximum so far, and the sum of 2^(maximum - level). MASKED: some row may not
    see some key; else each sees all, and all are there.
    """
    parts: tl.constexpr = (BLOCK + BLOCK_N - 1) // BLOCK_N
    run: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    key = tl.arange(0, BLOCK_N)
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
        if factors_ptr is None:
            s = tl.dot(x.q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        else:
            s = tl.dot(x.q, tl.trans(k), out_dtype=tl.float16)
        if MASKED:
            seen = (at[None, :] <= x.position[:, None]) & there[None, :]
            if WINDOW:
                seen = seen & (x.position[:, None] - at[None, :] < x.window)
            s = tl.where(seen, s, float("-inf"))
        if WIDTH < BLOCK_N and WIDTH < BLOCK:  # a step has several columns, not all of which need be the tile's
            m = _column_max(s, WIDTH, PACKED).to(tl.float32)  # [BLOCK_M, BLOCK_N / WIDTH]
            first_column = tile * (BLOCK // WIDTH) + step % parts * (BLOCK_N // WIDTH)
            behind = (tile + 1) * (BLOCK // WIDTH)
            level, total = _all_left(m, level, total, x, line_ptr, factors_ptr, tile, first_column, behind, PER)
        else:
            m = _row_max(s, PACKED).to(tl.float32)  # [BLOCK_M]
            if run > 1:
                m = tl.where(step % run == 0, m, tl.maximum(m, best))
                best = m
            if run == 1 or step % run == run - 1:  # known when this is compiled, as the other is not
                level, total = _left(m, level, total, x, line_ptr, factors_ptr, tile, step // run, PER)
    return level, total


@triton.jit(do_not_specialize=(*RUNTIME, "each"), do_not_specialize_on_alignment=UNALIGNED)
def maxima_kernel(
    maxima_ptr, sums_ptr, q_ptr, k_ptr, table_ptr, k_scale_ptr, factors_ptr, starts_ptr, lengths_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    scale, softcap, q_offset, q_len, kv_len, window,
    heads, kv_group, first_head, first_tile, blocks, reach, columns, each,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVERY: tl.constexpr, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """maxima ``[B, Hq, tiles, reach, PER]``: each sampled row's largest logit (base 2) in each column it may see, for
    PER rows of each query tile.

    sums ``[B, Hq, blocks, parts, BLOCK_M]``: log2 of the sum of 2^maximum over the columns of one program. Sampled rows
    are numbered through the query tiles of this launch, from tile `first_tile` of the call on. One program: BLOCK_M of
    them of one query head, and `each` key tiles; heads that share keys lie side by side, and long rows come first.
    factors_ptr: keys are those of `round_keys_kernel`, by position, and queries are rounded too; or None. What stands there for columns that a row may not see is nothing to be read.
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
    position, real = _sampled(first_tile * PER + number, first_head + h, queries, PER, BLOCK, EVERY, SHIFT)
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
        power = _exponent(_norm(q.to(tl.float32)))
        q = _rounded(q, power[:, None])
        scales = scales * tl.math.exp2(-power)
        # By position: no row of keys begins elsewhere.
        line = k_ptr + b.to(tl.int64) * stride_kb + kv.to(tl.int64) * stride_kh
        keys = KeySource(line, 0, stride_kn, None, stride_kb, None)
        factors = factors_ptr + (b * kv_heads + kv).to(tl.int64) * columns
    # Rows that are none see what the last one sees; nobody reads their maxima.
    position = tl.where(real, position, top)
    x = Sampled(q, position, number // PER * reach * PER + number % PER, scales, softcap if SOFTCAP else None, window)
    line_ptr = maxima_ptr + (b * heads + h).to(tl.int64) * tl.cdiv(blocks * BLOCK_M, PER) * reach * PER
    first, last = tl.program_id(1) * each, tl.minimum(tl.program_id(1) * each + each, top // BLOCK + 1)
    level, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    clear, crossing = first, tl.maximum(tl.minimum((low + 1) // BLOCK, last), first)
    if WINDOW:
        first = tl.maximum(first, tl.maximum(low - window + 1, 0) // BLOCK)
        clear = tl.maximum(first, tl.cdiv(tl.maximum(top - window + 1, 0), BLOCK))
        clear = tl.minimum(clear, tl.maximum(last, first))
        level, total = _tiles(
            first, clear, level, total, x, keys, line_ptr, factors, PER,
            True, True, BLOCK, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE, TYPE, PRECISION, PACKED,
        )  # fmt: skip
        crossing = tl.maximum(crossing, clear)
    if BLOCK % BLOCK_N == 0:
        level, total = _tiles(
            clear, crossing, level, total, x, keys, line_ptr, factors, PER,
            False, False, BLOCK, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE, TYPE, PRECISION, PACKED,
        )  # fmt: skip
    else:
        crossing = clear
    level, total = _tiles(
        crossing, last, level, total, x, keys, line_ptr, factors, PER,
        True, WINDOW, BLOCK, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE, TYPE, PRECISION, PACKED,
    )  # fmt: skip
    out = ((b * heads + h).to(tl.int64) * blocks + block) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + out * BLOCK_M + tl.arange(0, BLOCK_M), level + tl.math.log2(total))


@triton.jit
def _number(count):
    """float16 with so many below it, from -inf on."""
    key = count - 31745
    return tl.where(key < 0, key ^ 0x7FFF, key).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _smallest(lse, enough):
    """The smallest float16 that is `enough` less lse, as float32: rounding keeps the order, so larger ones are, too."""
    below = tl.zeros(lse.shape, tl.int32)
    for bit in tl.static_range(16):
        more = below + (32768 >> bit)
        below = tl.where(_number(more - 1).to(tl.float32) - lse < enough, more, below)
    return _number(below)


@triton.jit
def _marks(m, enough, more, PACKED: tl.constexpr):
    """int16: low byte all ones where m reaches `enough`, high byte where it reaches `more`; of NaN neither."""
    if PACKED:
        marks = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; set.ge.u32.f16x2 a, $1, $2; set.ge.u32.f16x2 b, $1, $3;"
            " lop3.b32 $0, a, b, 0x00FF00FF, 0xE4; }",  # a where the third has ones, else b
            "=r,r,r,r", [m, enough, more], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        marks = tl.where(m >= more, -1, tl.where(m >= enough, 255, 0)).to(tl.int16)
    return marks


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _kept(marks, HEADS: tl.constexpr):
    """[HEADS, columns]: 1 where a row of a head reaches enough, or one of any head reaches more. marks: of `_marks`,
    ``[rows, columns]``, the rows of the HEADS side by side."""
    ROWS: tl.constexpr = marks.shape[0] // HEADS
    COLUMNS: tl.constexpr = marks.shape[1]
    LANES: tl.constexpr = 8 if ROWS > 8 else ROWS
    # What a thread holds comes first: its rows, then eight of its columns, whose bits change threads together.
    marks = tl.reduce(tl.reshape(marks, [HEADS * ROWS // LANES, LANES, COLUMNS]), 1, _either)
    marks = tl.reshape(marks, [HEADS, ROWS // LANES, 8, COLUMNS // 8])
    bit = tl.arange(0, 8)
    bits = tl.sum((marks & 0x101).to(tl.int32) << bit[None, None, :, None], 2)
    bits = tl.reduce(bits, 1, _either)  # [HEADS, COLUMNS / 8]
    bits = bits | (tl.reduce(bits, 0, _either) >> 8)[None, :]
    return tl.reshape((bits[:, None, :] >> bit[None, :, None]) & 1, [HEADS, COLUMNS]).to(tl.int8)


@triton.jit(do_not_specialize=(*RUNTIME, "rows", "lowest", "parts"), do_not_specialize_on_alignment=("sinks_ptr",))
def choose_kernel(
    chosen_ptr, maxima_ptr, sums_ptr, sinks_ptr, starts_ptr, lengths_ptr, least, times, strong, q_offset, q_len, kv_len,
    window, heads, kv_group, first_head, first_tile, blocks, reach, rows, columns, lowest, parts,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVERY: tl.constexpr, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr,
    APART: tl.constexpr,
    MEMBERS: tl.constexpr, UNION: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """chosen ``[B, h, rows, columns]``: which columns have a share of 2^least or more for one row of a query tile.

    Or of 2^times times the mean share of the columns that the row may see. Chosen of a float type: the largest share
    instead. APART: only columns from `lowest` to before the query tile's own key tile, and behind that nothing is
    stored. h: query heads, or with UNION KV heads. SHARED: with a share of 2^strong, too, it is chosen for all heads
    of its KV head. One program: some columns of one query tile, COLUMNS at a time, of the MEMBERS heads (a power of
    two, not all of which need be there) of a KV head with UNION or SHARED, else of one; their rows, ROWS of each (a
    power of two), lie side by side. Long rows come first.
    """
    GROUP: tl.constexpr = UNION or SHARED
    PER: tl.constexpr = BLOCK // EVERY
    HEADS: tl.constexpr = MEMBERS if SHARED else 1
    SHARES: tl.constexpr = chosen_ptr.dtype.element_ty == tl.float32
    HALVES: tl.constexpr = maxima_ptr.dtype.element_ty == tl.float16
    tile, unit = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    units = heads // kv_group if GROUP else heads
    b, u = unit // units, unit % units
    entry = tl.arange(0, MEMBERS * ROWS)
    member, j = entry // ROWS, entry % ROWS
    h = u * kv_group + member if GROUP else u + member
    real = j < PER
    if GROUP:
        real = real & (member < kv_group)
    _, queries = _queries(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, BLOCK)
    number = tile * PER + j
    position, there = _sampled(first_tile * PER + number, first_head + h, queries, PER, BLOCK, EVERY, SHIFT)
    real = real & there
    top = tl.max(tl.where(real, position, -1), 0)
    end = 0 if top < 0 else top // WIDTH + 1
    behind = columns
    if APART:
        own = (queries.tile + first_tile + tile) * (BLOCK // WIDTH)
        end, behind = tl.minimum(end, own), tl.minimum(columns, own + BLOCK // WIDTH)
    share = tl.cdiv(tl.cdiv(columns, COLUMNS), tl.num_programs(2)) * COLUMNS
    begin = tl.program_id(2) * share
    behind = tl.minimum(behind, begin + share)
    if begin >= behind:
        return
    loaded = member < kv_group if GROUP else member == member  # noqa: PLR0124 - all
    if ROWS != PER:
        loaded = loaded & (j < PER)
    source = (b * heads + h).to(tl.int64) * tl.cdiv(blocks * BLOCK_M, PER) * reach * PER + tile * reach * PER
    at = maxima_ptr + (source + j)[:, None]
    c = begin + tl.arange(0, COLUMNS)
    level, total = tl.full([MEMBERS * ROWS], float("-inf"), tl.float32), tl.zeros([MEMBERS * ROWS], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
        level, total = _joined(level, total, sink)
    line = (b * heads + h).to(tl.int64) * blocks + number // BLOCK_M
    for part in tl.range(parts, loop_unroll_factor=4):
        sums = tl.load(sums_ptr + (line * parts + part) * BLOCK_M + number % BLOCK_M, mask=loaded, other=0.0)
        level, total = _joined(level, total, tl.where(real, sums, float("-inf")))
    lse = tl.where(total > 0.0, level + tl.math.log2(tl.where(total > 0.0, total, 1.0)), 0.0)
    first = tl.zeros_like(position)
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // WIDTH
    count = tl.maximum(position, 0) // WIDTH - first + 1  # columns that a row may see
    enough = tl.minimum(least, times - tl.math.log2(count.to(tl.float32)))
    more = tl.maximum(enough, strong) if SHARED else enough
    if HALVES:
        # Nothing reaches NaN. What is no number became the largest float16 where maxima were stored.
        enough = tl.where(real, _smallest(lse, enough), float("nan"))
        more = tl.where(real, _smallest(lse, more), float("nan")) if SHARED else enough
    head = tl.arange(0, HEADS)
    row = (b * heads + u * kv_group + head if SHARED else unit + head).to(tl.int64) * rows + first_tile + tile
    out = chosen_ptr + (row * columns)[:, None]
    stored = head < kv_group if SHARED else head < 1
    for _ in tl.range(begin, behind, COLUMNS):
        # What lies side by side is loaded at once, also where a row sees nothing.
        m = tl.load(at + c[None, :] * PER, mask=loaded[:, None] & (c < end)[None, :])
        seen = (c < end) & (c >= lowest) if APART else c < end
        if SHARES or not HALVES:
            weight = m.to(tl.float32) - lse[:, None]
        if SHARES:
            inside = real[:, None] & seen[None, :]
            if WINDOW:
                inside = inside & (c[None, :] >= first[:, None])
            result = tl.math.exp2(tl.max(tl.where(inside, weight, float("-inf")), 0))[None, :]
        else:
            if HALVES:
                marks = _marks(m, enough[:, None], more[:, None], PACKED)
            else:  # what is no number is not known to be small
                marks = tl.where(weight < more[:, None], tl.where(weight < enough[:, None], 0, 255), -1)
                marks = tl.where(real[:, None], marks, 0)
            if WINDOW:
                marks = tl.where(c[None, :] >= first[:, None], marks, 0)
            result = tl.where(seen[None, :], _kept(marks, HEADS), 0)
        tl.store(out + c[None, :], result, mask=stored[:, None] & (c < behind)[None, :])
        c += COLUMNS
