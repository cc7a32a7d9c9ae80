"""Dot products of groups of tokens, as estimators take them: a causal matrix product without a copy of q and k.

A group is `SIZE` consecutive tokens of the row's grid, one vector of ``SIZE * D`` entries. Device functions: which
tile a program has, and its products; what becomes of them is each kernel's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.steps import floor_div


@triton.jit
def _tiles_before(n, RATIO: tl.constexpr):
    """Tiles of the rows 0 to n - 1, where row r has ``r // RATIO + 1`` of them."""
    whole = n // RATIO
    return RATIO * (whole * (whole - 1) // 2) + (n - whole * RATIO) * whole + n


@triton.jit
def tile_of(number, skipped, RATIO: tl.constexpr):
    """Row and column of the tile `number` of a causal map of tiles RATIO times as wide as high; rows from `skipped`.

    Row r reaches to column ``r // RATIO``. Holds for up to 2^24 tiles.
    """
    place = number + _tiles_before(skipped, RATIO)
    root = tl.sqrt(0.25 + 2.0 * place.to(tl.float32) / RATIO) - 0.5
    row = (root * RATIO).to(tl.int32)
    for _ in tl.static_range(3):
        row = tl.where(_tiles_before(row, RATIO) > place, row - 1, row)
    for _ in tl.static_range(3):
        row = tl.where(_tiles_before(row + 1, RATIO) <= place, row + 1, row)
    return row, place - _tiles_before(row, RATIO)


@triton.jit
def row_of_batch(
    b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr
):  # fmt: skip
    """Of a batch row: index of position 0 among the keys, position of query row 0, and the positions that hold queries.

    Returns start, first, low, high: queries stand at `low` to `high` - 1, and keys that count before `high`.
    """
    start = 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + b)
    length = kv_len - start
    if HAS_LENGTHS:
        length = tl.load(lengths_ptr + b)
    first = q_offset - start
    return start, first, tl.maximum(first, 0), tl.minimum(first + q_len, length)


@triton.jit
def places(group, low, high, SIZE: tl.constexpr):
    """Half-open range of the places in each group that hold a token at positions `low` to `high` - 1."""
    return tl.minimum(tl.maximum(low - group * SIZE, 0), SIZE), tl.minimum(tl.maximum(high - group * SIZE, 0), SIZE)


@triton.jit
def _operands(
    j, b, h, hk, q_desc, k_desc, q_row, k_row, q_group, k_group, q_low, q_high, k_low, k_high, stride_qn, stride_kn,
    table_ptr, stride_kb,
    SIZE: tl.constexpr, REVERSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """q [M, K] and k [N, K] of one step: BLOCK_K entries of one place of every group. k_group: number of the first."""
    chunks: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    place, entry = j // chunks, (j % chunks) * BLOCK_K
    other = SIZE - 1 - place if REVERSED else place
    if TMA and PAGE == 0:
        q = q_desc.load([b, h, place, q_group, entry]).reshape([BLOCK_M, BLOCK_K])
        k = k_desc.load([b, hk, other, k_group, entry]).reshape([BLOCK_N, BLOCK_K])
    else:
        q_real, k_real = ((place >= q_low) & (place < q_high))[:, None], ((other >= k_low) & (other < k_high))[:, None]
        if D % BLOCK_K != 0:
            inside = (entry + tl.arange(0, BLOCK_K) < D)[None, :]
            q_real, k_real = q_real & inside, k_real & inside
        if TMA:
            q = q_desc.load([b, h, place, q_group, entry]).reshape([BLOCK_M, BLOCK_K])
        else:
            q = tl.load(q_row + (place * stride_qn + entry), mask=q_real, other=0.0)
        if PAGE > 0 and PAGE < SIZE:
            group = k_group + tl.arange(0, BLOCK_N)
            there = (other >= k_low) & (other < k_high)
            page = tl.load(table_ptr + group * (SIZE // PAGE) + other // PAGE, mask=there, other=0).to(tl.int64)
            k = tl.load(k_row + page[:, None] * stride_kb + (other % PAGE * stride_kn + entry), mask=k_real, other=0.0)
        else:
            k = tl.load(k_row + (other * stride_kn + entry), mask=k_real, other=0.0)
    return q, k


@triton.jit
def group_products(
    b, h, hk, first_q, first_k, q_shift, start, first, low, high,
    q_ptr, k_ptr, table_ptr, q_desc, k_desc, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, drop,
    SIZE: tl.constexpr, REVERSED: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [M, N]: products of the query groups from `first_q` and the key groups from `first_k`.

    Tokens outside `low` to `high` - 1 count as zeros. TMA: by tensor descriptors ``[B, H, SIZE, groups, D]``, whose
    query groups begin with the group `q_shift`; no group of the tile may hold such tokens and others too.
    PAGE: 0, or tokens of a page, a multiple of SIZE or one of its parts; k then goes by pointers, its one row begins
    with its first key, and stride_kb is that of pages. Entries of the table behind `high` are not read.
    REVERSED: place a of a query group meets place SIZE - 1 - a of a key group. HALF: for a group and itself, the places
    before HALF do not count; `drop` says whether the tile holds such pairs.
    """
    chunks: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    steps: tl.constexpr = SIZE * chunks
    q_group, k_group = first_q + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_N)
    entries = tl.arange(0, BLOCK_K)[None, :]
    q_low, q_high = places(q_group, low, high, SIZE)
    k_low, k_high = places(k_group, 0, high, SIZE)
    # Of what goes by descriptors, these stay unused, and vanish.
    q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    k_base = k_ptr + b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh
    q_row = q_base + (q_group * SIZE - first).to(tl.int64)[:, None] * stride_qn + entries
    if PAGE > 0 and PAGE < SIZE:
        k_row = k_base + entries
    elif PAGE > 0:
        # A group lies in one page: one look-up before the loop, which is then that of a tensor.
        in_page: tl.constexpr = PAGE // SIZE
        page = tl.load(table_ptr + k_group // in_page, mask=k_high > 0, other=0).to(tl.int64)
        slot = (k_group % in_page * SIZE).to(tl.int64)
        k_row = k_base + (page * stride_kb + slot * stride_kn)[:, None] + entries
    else:
        k_row = k_base + (k_group * SIZE + start).to(tl.int64)[:, None] * stride_kn + entries
    middle = steps
    if HALF > 0:
        middle = tl.where(drop, HALF * chunks, steps)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for j in tl.range(0, middle):
        q, k = _operands(
            j, b, h, hk, q_desc, k_desc, q_row, k_row, first_q - q_shift, first_k, q_low, q_high, k_low, k_high,
            stride_qn, stride_kn, table_ptr, stride_kb, SIZE, REVERSED, BLOCK_M, BLOCK_N, BLOCK_K, D, TMA, PAGE,
        )  # fmt: skip
        acc = tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)
    if HALF > 0:
        if drop:
            acc = tl.where(q_group[:, None] == k_group[None, :], 0.0, acc)
        for j in tl.range(middle, steps):
            q, k = _operands(
                j, b, h, hk, q_desc, k_desc, q_row, k_row, first_q - q_shift, first_k, q_low, q_high, k_low, k_high,
                stride_qn, stride_kn, table_ptr, stride_kb, SIZE, REVERSED, BLOCK_M, BLOCK_N, BLOCK_K, D, TMA, PAGE,
            )  # fmt: skip
            acc = tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)
    return acc


@triton.jit
def program_tile(
    pid, tiles, skipped, base, heads, kv_group, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """b, h, hk, row of tiles in the call, column: of a program. Heads that share keys lie side by side, then columns.

    tiles: of one head in this launch. base: height of row 0 above the corner of the causal map, in tiles, rounded up;
    skipped: rows of tiles before this launch's first.
    """
    member, rest = pid % kv_group, pid // kv_group
    pair = rest // tiles
    kv_heads = heads // kv_group
    b, hk = pair // kv_heads, pair % kv_heads
    row, column = tile_of(rest % tiles, base + skipped, BLOCK_N // BLOCK_M)
    return b, hk * kv_group + member, hk, row - base, column


@triton.jit
def first_query_group(first, row, BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """First query group of a row of tiles; tiles begin with the block of the call's first query."""
    return floor_div(first, BLOCK) * (BLOCK // SIZE) + row * BLOCK_M
