"""One program's work: attention of one query block of one head over its tiles and stripes.

Where steps whose logits cannot matter are left out, other loops take the place of the usual ones: skip-softmax under any
mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.attention.arguments import Head, Rows, load_keys
from sparseprefill.kernels.steps import (
    LN2,
    LOG2E,
    batch_row,
    column_keys,
    count_up_to,
    crossing_steps,
    factor,
    floor_div,
    load_rows,
    masked_step,
    step,
)
from sparseprefill.kernels.steps import logits as logits_of


@triton.jit
def attend(
    block, bh, queries, cache, mask, carry, outputs, sizes, logits, S, CAREFUL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Query block `block` (of BLOCK_M rows) of head `bh`. CAREFUL: see `masked_step`. The rest: see `arguments`.

    Of pages there is one batch row, whose strides are those of pages.
    """
    blocks: tl.constexpr = S.TILE_Q // S.BLOCK_M
    b, h = bh // sizes.heads, bh % sizes.heads
    kv_head = h // sizes.kv_group
    tile_row = block // blocks
    row_of_lists = bh.to(tl.int64) * mask.tile_rows + tile_row

    start, length, first = batch_row(b, sizes.starts, sizes.lengths, sizes.q_offset, sizes.kv_len)
    tile = floor_div(first, S.TILE_Q) + tile_row
    low = tile * S.TILE_Q + (block % blocks) * S.BLOCK_M
    position = low + tl.arange(0, S.BLOCK_M)  # [BLOCK_M]
    row = position - first
    real = (row >= 0) & (row < sizes.q_len) & (position >= 0) & (position < length)
    last = tl.minimum(tl.minimum(low + S.BLOCK_M, first + sizes.q_len), length) - 1
    live = (low + S.BLOCK_M > 0) & (low + S.BLOCK_M > first) & (last >= low)
    rows = Rows(b, h, kv_head, start, sizes.kv_len, first, tile, low, last, live, position, row, real)

    k_base = cache.k.ptr + b.to(tl.int64) * cache.k.stride_b + kv_head.to(tl.int64) * cache.k.stride_h
    v_base = cache.v.ptr + b.to(tl.int64) * cache.v.stride_b + kv_head.to(tl.int64) * cache.v.stride_h
    k_head = Head(k_base, cache.k.stride_n, cache.table, cache.k.stride_b, factor(cache.k.scale))
    v_head = Head(v_base, cache.v.stride_n, cache.table, cache.v.stride_b, factor(cache.v.scale))
    q_base = queries.ptr + b.to(tl.int64) * queries.stride_b + h.to(tl.int64) * queries.stride_h
    q = load_rows(q_base, row, real, queries.stride_n, S.D, S.BLOCK_D)  # [BLOCK_M, BLOCK_D]
    out_row = bh.to(tl.int64) * sizes.q_len + row
    dims = tl.arange(0, S.BLOCK_V)
    inside = (row >= 0) & (row < sizes.q_len)
    if S.V == S.BLOCK_V:
        inside_out = inside[:, None]
    else:
        inside_out = inside[:, None] & (dims < S.V)[None, :]

    if carry.m is not None:
        m = tl.load(carry.m + out_row, mask=inside, other=float("-inf")) * LOG2E  # [BLOCK_M]
        l = tl.load(carry.l + out_row, mask=inside, other=0.0)  # noqa: E741 - [BLOCK_M]
        where = out_row[:, None] * S.V + dims[None, :]
        acc = tl.load(carry.acc + where, mask=inside_out, other=0.0)  # [BLOCK_M, BLOCK_V]
    else:
        m = tl.full([S.BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([S.BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([S.BLOCK_M, S.BLOCK_V], tl.float32)

    bound = None
    if logits.below is not None:
        bound = bound_of(logits.below, b)
    skipped = 0
    if mask.tiles.counts is not None:
        if logits.below is not None:
            acc, l, m, skipped = skim_tiles(
                acc, l, m, q, rows, k_head, v_head, cache.k.desc, cache.v.desc, mask.tiles, row_of_lists, logits, bound, S,
                CAREFUL, PRECISION,
            )  # fmt: skip
        else:
            acc, l, m = attend_tiles(
                acc, l, m, q, rows, k_head, v_head, cache.k.desc, cache.v.desc, mask.tiles, row_of_lists, logits, S,
                CAREFUL, PRECISION,
            )  # fmt: skip
    if mask.stripes.counts is not None:
        acc, l, m, more = attend_stripes(
            acc, l, m, q, rows, k_head, v_head, mask, bh, row_of_lists, logits, bound, S, CAREFUL, PRECISION
        )
        skipped += more
    if logits.below is not None:
        counted = outputs.skipped + 2 * (bh.to(tl.int64) * mask.tile_rows * blocks + block)
        tl.store(counted, skipped)
        tl.store(counted + 1, 0)

    if not CAREFUL:
        nonfinite = tl.max(tl.where((acc != acc) & real[:, None], 1, 0))
        tl.store(outputs.nonfinite + bh.to(tl.int64) * mask.tile_rows * blocks + block, nonfinite.to(tl.int8))
    m = tl.where(real, m, float("-inf"))
    l = tl.where(real, l, 0.0)  # noqa: E741
    if outputs.out is None:
        tl.store(outputs.state.m + out_row, m * LN2, mask=inside)  # [BLOCK_M]
        tl.store(outputs.state.l + out_row, l, mask=inside)  # [BLOCK_M]
        acc = tl.where(real[:, None], acc, 0.0)
        where = out_row[:, None] * S.V + dims[None, :]
        tl.store(outputs.state.acc + where, acc, mask=inside_out)  # [BLOCK_M, BLOCK_V]
    else:
        lse = tl.where(l == 0.0, float("-inf"), (m + tl.math.log2(tl.where(l == 0.0, 1.0, l))) * LN2)
        lse_base = outputs.lse + b.to(tl.int64) * outputs.stride_lb + h.to(tl.int64) * outputs.stride_lh
        tl.store(lse_base + row, lse, mask=inside)  # [BLOCK_M]
        total = l
        if outputs.sinks is not None:
            base = tl.where(m == float("-inf"), 0.0, m)
            total += tl.math.exp2(tl.load(outputs.sinks + h).to(tl.float32) * LOG2E - base)
        out = tl.where(real[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
        out_base = outputs.out + b.to(tl.int64) * outputs.stride_ob + h.to(tl.int64) * outputs.stride_oh
        where = out_base + row.to(tl.int64)[:, None] * outputs.stride_on + dims[None, :]
        tl.store(where, out.to(outputs.out.dtype.element_ty), mask=inside_out)  # [BLOCK_M, BLOCK_V]


@triton.jit
def attend_tiles(
    acc, l, m, q, rows, keys, values, k_desc, v_desc, tiles, row_of_lists, logits, S, CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the tiles of the query tile's list: those below every row first, which need no mask.

    keys, values: a `Head` each; those steps read through the descriptors where there are any.
    """
    parts: tl.constexpr = S.TILE_K // S.BLOCK_N
    offset = tl.load(tiles.offsets + row_of_lists)
    steps = tl.where(rows.live, tl.load(tiles.counts + row_of_lists), 0) * parts
    list_ptr = tiles.indices + offset
    unmasked = 0
    if logits.window is None:
        unmasked = steps - crossing_steps(list_ptr, steps // parts, rows.low, S.TILE_Q, S.TILE_K, S.BLOCK_N)
    for j in tl.range(0, unmasked):
        key = tl.load(list_ptr + j // parts) * S.TILE_K + (j % parts) * S.BLOCK_N + rows.start
        if k_desc is not None:
            k = k_desc.load([rows.b, rows.kv_head, key, 0]).reshape([S.BLOCK_N, S.BLOCK_D])  # [BLOCK_N, BLOCK_D]
            v = v_desc.load([rows.b, rows.kv_head, key, 0]).reshape([S.BLOCK_N, S.BLOCK_V])  # [BLOCK_N, BLOCK_V]
        else:
            at = key + tl.arange(0, S.BLOCK_N)
            k = load_keys(keys, at, at < rows.kv_len, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
            v = load_keys(values, at, at < rows.kv_len, q.dtype, S.PAGE, S.V, S.BLOCK_V)  # [BLOCK_N, BLOCK_V]
        acc, l, m = step(acc, l, m, q, k, v, logits, PRECISION)
    for j in tl.range(unmasked, steps, num_stages=1):
        at = tl.load(list_ptr + j // parts) * S.TILE_K + (j % parts) * S.BLOCK_N + tl.arange(0, S.BLOCK_N)
        keep = at[None, :] <= rows.position[:, None]  # [BLOCK_M, BLOCK_N]
        if logits.window is not None:
            keep = keep & (rows.position[:, None] - at[None, :] < logits.window)
        acc, l, m, _ = visit(
            acc, l, m, 0, q, rows, keys, values, at + rows.start, at + rows.start < rows.kv_len, keep, logits, None, S,
            CAREFUL, PRECISION,
        )  # fmt: skip
    return acc, l, m


@triton.jit
def attend_stripes(
    acc, l, m, q, rows, keys, values, mask, bh, row_of_lists, logits, bound, S, CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the stripes of the query tile group's list, up to the last row, and the pairs left out.

    Keys of tiles in `bitmap` are left out, since the tiles have them. Steps of keys below every row come first, without a
    causal mask; where steps may be left out, all have one, and BLOCK_N keys of the list at a time vote as a tile does.
    """
    group = floor_div(rows.tile, S.GROUP) - floor_div(rows.first, S.TILE_Q * S.GROUP)
    row_of_stripes = bh.to(tl.int64) * mask.group_rows + group
    offset = tl.load(mask.stripes.offsets + row_of_stripes, mask=rows.live, other=0)
    count = tl.load(mask.stripes.counts + row_of_stripes, mask=rows.live, other=0)
    seen = count_up_to(mask.stripes.indices, offset, count, rows.last, S.WIDTH)  # of the list's keys by the last row
    unmasked = 0
    if logits.window is None and logits.below is None:
        entries = seen
        if S.WIDTH > 1:
            entries = tl.cdiv(seen, S.WIDTH)
        unmasked = count_up_to(mask.stripes.indices, offset, entries, rows.low, S.WIDTH) // S.BLOCK_N
    list_ptr = mask.stripes.indices + offset
    number = tl.arange(0, S.BLOCK_N)
    skipped = 0
    if logits.below is None:
        if mask.bitmap is not None:
            for j in tl.range(0, unmasked):
                at = column_keys(list_ptr, j * S.BLOCK_N, number, S.WIDTH)  # [BLOCK_N]
                k = load_keys(keys, at + rows.start, number >= 0, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
                v = load_keys(
                    values, at + rows.start, number >= 0, q.dtype, S.PAGE, S.V, S.BLOCK_V
                )  # [BLOCK_N, BLOCK_V]
                free = tl.load(mask.bitmap + row_of_lists * mask.columns + at // S.TILE_K) == 0  # [BLOCK_N]
                acc, l, m = masked_step(acc, l, m, q, k, v, free[None, :], logits, PRECISION, CAREFUL, S.BLOCK_N)
        else:
            for j in tl.range(0, unmasked):
                at = column_keys(list_ptr, j * S.BLOCK_N, number, S.WIDTH) + rows.start  # [BLOCK_N]
                k = load_keys(keys, at, number >= 0, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
                v = load_keys(values, at, number >= 0, q.dtype, S.PAGE, S.V, S.BLOCK_V)  # [BLOCK_N, BLOCK_V]
                acc, l, m = step(acc, l, m, q, k, v, logits, PRECISION)
    for j in tl.range(unmasked, tl.cdiv(seen, S.BLOCK_N), num_stages=1):
        number = tl.arange(0, S.BLOCK_N)
        some = j * S.BLOCK_N + number < seen
        at = column_keys(list_ptr, j * S.BLOCK_N, number, S.WIDTH, seen)  # [BLOCK_N]
        if mask.bitmap is not None:
            taken = tl.load(mask.bitmap + row_of_lists * mask.columns + at // S.TILE_K, mask=some, other=1)  # [BLOCK_N]
            some = some & (taken == 0)
        keep = some[None, :] & (at[None, :] <= rows.position[:, None])  # [BLOCK_M, BLOCK_N]
        if logits.window is not None:
            keep = keep & (rows.position[:, None] - at[None, :] < logits.window)
        acc, l, m, skipped = visit(
            acc, l, m, skipped, q, rows, keys, values, at + rows.start, some, keep, logits, bound, S, CAREFUL, PRECISION
        )
    return acc, l, m, skipped


@triton.jit
def bound_of(below_ptr, b):
    """Base-2 logits by which a tile's maximum has to fall short of the running one: log2 of the threshold of batch row
    `b`; -inf, which nothing falls short of, where the threshold is 0, or 1 and more."""
    below = tl.load(below_ptr + b)
    inside = (below > 0.0) & (below < 1.0)
    return tl.where(inside, tl.math.log2(tl.where(inside, below, 1.0)), float("-inf"))


@triton.jit
def wanted(s, m, bound, real):
    """True if some real row wants a step: its largest logit does not lie `bound` below its maximum so far.

    s [M, N]: base-2 logits, -inf where a row may not see a key. m [M]. One comparison decides it all: a row without a
    maximum yet (-inf) wants every step, and so does everybody where the bound is -inf.
    """
    short = tl.max(s, 1) < m + bound  # [M]
    return tl.max(tl.where(short | (real == 0), 0, 1), 0) > 0


@triton.jit
def tile_step(j, steps, crossing, PARTS: tl.constexpr):
    """The step of an ascending list that comes j-th: the crossing ones from the last, those of the first tile, the rest."""
    head = tl.minimum(PARTS, steps - crossing)
    first = tl.where(j < crossing + head, crossing + head - 1 - j, steps - 1 - j + head)
    return tl.where(j < crossing, steps - 1 - j, first)


@triton.jit
def visit(
    acc, l, m, skipped, q, rows, keys, values, at, there, keep, logits, bound, S, CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A masked step over the keys `at` [N], of which some are not `there`: the state, and how many pairs were left out,
    `skipped` included.

    keep [M, N]: pairs that count. Values are loaded if wanted; without a threshold every step is.
    """
    k = load_keys(keys, at, there, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
    if logits.below is None:
        v = load_keys(values, at, there, q.dtype, S.PAGE, S.V, S.BLOCK_V)  # [BLOCK_N, BLOCK_V]
        acc, l, m = masked_step(acc, l, m, q, k, v, keep, logits, PRECISION, CAREFUL, S.BLOCK_N)
    else:
        s = logits_of(q, k, logits.scale, logits.softcap, logits.softcap is not None, PRECISION)  # [BLOCK_M, BLOCK_N]
        if wanted(tl.where(keep, s, float("-inf")), m, bound, rows.real):
            v = load_keys(values, at, there, q.dtype, S.PAGE, S.V, S.BLOCK_V)  # [BLOCK_N, BLOCK_V]
            acc, l, m = masked_step(acc, l, m, q, k, v, keep, logits, PRECISION, CAREFUL, S.BLOCK_N)
        else:
            skipped += pairs_of(keep, rows.real)
    return acc, l, m, skipped


@triton.jit
def skim_tiles(
    acc, l, m, q, rows, keys, values, k_desc, v_desc, tiles, row_of_lists, logits, bound, S, CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to tiles in the order of `SkipSoftmax`; the state, and how many pairs were left out (BLASST, Algorithm 1).

    Logits stand twice in each step, here and in `step`; the compiler makes one of them. Values are loaded if wanted.
    """
    parts: tl.constexpr = S.TILE_K // S.BLOCK_N
    offset = tl.load(tiles.offsets + row_of_lists)
    steps = tl.where(rows.live, tl.load(tiles.counts + row_of_lists), 0) * parts
    list_ptr = tiles.indices + offset
    crossing = crossing_steps(list_ptr, steps // parts, rows.low, S.TILE_Q, S.TILE_K, S.BLOCK_N)
    masked = crossing
    if logits.window is not None:
        masked = steps
    skipped = 0
    for j in tl.range(0, masked, num_stages=1):
        t = tile_step(j, steps, crossing, parts)
        at = tl.load(list_ptr + t // parts) * S.TILE_K + (t % parts) * S.BLOCK_N + tl.arange(0, S.BLOCK_N)  # [BLOCK_N]
        keep = at[None, :] <= rows.position[:, None]  # [BLOCK_M, BLOCK_N]
        if logits.window is not None:
            keep = keep & (rows.position[:, None] - at[None, :] < logits.window)
        acc, l, m, skipped = visit(
            acc, l, m, skipped, q, rows, keys, values, at + rows.start, at + rows.start < rows.kv_len, keep, logits,
            bound, S, CAREFUL, PRECISION,
        )  # fmt: skip
    whole = tl.sum(rows.real.to(tl.int32), 0) * S.BLOCK_N
    for j in tl.range(masked, steps):
        t = tile_step(j, steps, crossing, parts)
        key = tl.load(list_ptr + t // parts) * S.TILE_K + (t % parts) * S.BLOCK_N + rows.start
        at = key + tl.arange(0, S.BLOCK_N)
        if k_desc is not None:
            k = k_desc.load([rows.b, rows.kv_head, key, 0]).reshape([S.BLOCK_N, S.BLOCK_D])  # [BLOCK_N, BLOCK_D]
        else:
            k = load_keys(keys, at, at < rows.kv_len, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
        s = logits_of(q, k, logits.scale, logits.softcap, logits.softcap is not None, PRECISION)  # [BLOCK_M, BLOCK_N]
        if wanted(s, m, bound, rows.real):
            if v_desc is not None:
                v = v_desc.load([rows.b, rows.kv_head, key, 0]).reshape([S.BLOCK_N, S.BLOCK_V])  # [BLOCK_N, BLOCK_V]
            else:
                v = load_keys(values, at, at < rows.kv_len, q.dtype, S.PAGE, S.V, S.BLOCK_V)  # [BLOCK_N, BLOCK_V]
            acc, l, m = step(acc, l, m, q, k, v, logits, PRECISION)
        else:
            skipped += whole
    return acc, l, m, skipped


@triton.jit
def pairs_of(keep, real):
    """The number of pairs [M, N] of real rows."""
    return tl.sum(tl.sum((keep & real[:, None]).to(tl.int32), 1), 0)
