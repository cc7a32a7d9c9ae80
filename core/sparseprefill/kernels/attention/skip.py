"""The loops of a block that leaves out steps whose logits cannot matter: skip-softmax under any mask."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.attention.arguments import load_keys
from sparseprefill.kernels.steps import column_keys, count_up_to, crossing_steps, floor_div, masked_step, step
from sparseprefill.kernels.steps import logits as logits_of


@triton.jit
def bound_of(below_ptr, b):
    """Base-2 logits by which a tile's maximum has to fall short of the running one: log2 of the threshold of batch row
    `b`; -inf, which nothing falls short of, where the threshold is 0, or 1 and more."""
    below = tl.load(below_ptr + b)
    inside = (below > 0.0) & (below < 1.0)
    return tl.where(inside, tl.math.log2(tl.where(inside, below, 1.0)), float("-inf"))


@triton.jit
def wanted(s, m, bound, real):
    """Whether some real row wants a step: its largest logit does not lie `bound` below its maximum so far.

    s [M, N]: base-2 logits, -inf where a row may not see a key. m [M]. One comparison decides it all: a row without a
    maximum yet (-inf) wants every step, and so does everybody where the bound is -inf.
    """
    short = tl.max(s, 1) < m + bound  # [M]
    return tl.max(tl.where(short | (real == 0), 0, 1), 0) > 0


@triton.jit
def tile_step(j, steps, crossing, PARTS: tl.constexpr):
    """Which step of an ascending list comes j-th: the crossing ones from the last, those of the first tile, the rest."""
    head = tl.minimum(PARTS, steps - crossing)
    first = tl.where(j < crossing + head, crossing + head - 1 - j, steps - 1 - j + head)
    return tl.where(j < crossing, steps - 1 - j, first)


@triton.jit
def skim_tiles(
    acc, l, m, q, rows, keys, values, k_desc, v_desc, tiles, row_of_lists, logits, bound, S, CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attend_tiles`, in the order of `SkipSoftmax`; the state, and how many pairs were left out (BLASST, Algorithm 1).

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
        there = at + rows.start < rows.kv_len
        k = load_keys(keys, at + rows.start, there, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
        s = logits_of(q, k, logits.scale, logits.softcap, logits.softcap is not None, PRECISION)  # [BLOCK_M, BLOCK_N]
        if wanted(tl.where(keep, s, float("-inf")), m, bound, rows.real):
            v = load_keys(values, at + rows.start, there, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
            acc, l, m = masked_step(acc, l, m, q, k, v, keep, logits, PRECISION, CAREFUL, S.BLOCK_N)
        else:
            skipped += pairs_of(keep, rows.real)
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
                v = v_desc.load([rows.b, rows.kv_head, key, 0]).reshape([S.BLOCK_N, S.BLOCK_D])  # [BLOCK_N, BLOCK_D]
            else:
                v = load_keys(values, at, at < rows.kv_len, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
            acc, l, m = step(acc, l, m, q, k, v, logits, PRECISION)
        else:
            skipped += whole
    return acc, l, m, skipped


@triton.jit
def stripe_list(rows, mask, bh, S):
    """Of the query tile group's stripes: where the list begins, and how many of its keys the last row sees."""
    group = floor_div(rows.tile, S.GROUP) - floor_div(rows.first, S.TILE_Q * S.GROUP)
    row_of_stripes = bh.to(tl.int64) * mask.group_rows + group
    offset = tl.load(mask.stripes.offsets + row_of_stripes, mask=rows.live, other=0)
    count = tl.load(mask.stripes.counts + row_of_stripes, mask=rows.live, other=0)
    seen = count_up_to(mask.stripes.indices, offset, count, rows.last, S.WIDTH)
    return offset, seen


@triton.jit
def stripe_step(list_ptr, j, seen, rows, mask, row_of_lists, logits, S):
    """The j-th BLOCK_N stripes: keys and whether there are any ``[BLOCK_N]``, and pairs to keep ``[BLOCK_M, BLOCK_N]``.

    Keys of tiles in `bitmap` are left out, since the tiles have them.
    """
    number = tl.arange(0, S.BLOCK_N)
    some = j * S.BLOCK_N + number < seen
    at = column_keys(list_ptr, j * S.BLOCK_N, number, S.WIDTH, some=some)  # [BLOCK_N]
    if mask.bitmap is not None:
        taken = tl.load(mask.bitmap + row_of_lists * mask.columns + at // S.TILE_K, mask=some, other=1)  # [BLOCK_N]
        some = some & (taken == 0)
    keep = some[None, :] & (at[None, :] <= rows.position[:, None])  # [BLOCK_M, BLOCK_N]
    if logits.window is not None:
        keep = keep & (rows.position[:, None] - at[None, :] < logits.window)
    return at, some, keep


@triton.jit
def skim_stripes(
    acc, l, m, q, rows, keys, values, mask, bh, row_of_lists, logits, bound, S, CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `attend_stripes`: BLOCK_N columns of the list at a time vote as a tile does. The state, and the pairs left out."""
    offset, seen = stripe_list(rows, mask, bh, S)
    list_ptr = mask.stripes.indices + offset
    skipped = 0
    for j in tl.range(0, tl.cdiv(seen, S.BLOCK_N), num_stages=1):
        at, some, keep = stripe_step(list_ptr, j, seen, rows, mask, row_of_lists, logits, S)
        k = load_keys(keys, at + rows.start, some, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
        s = logits_of(q, k, logits.scale, logits.softcap, logits.softcap is not None, PRECISION)  # [BLOCK_M, BLOCK_N]
        if wanted(tl.where(keep, s, float("-inf")), m, bound, rows.real):
            v = load_keys(values, at + rows.start, some, q.dtype, S.PAGE, S.D, S.BLOCK_D)  # [BLOCK_N, BLOCK_D]
            acc, l, m = masked_step(acc, l, m, q, k, v, keep, logits, PRECISION, CAREFUL, S.BLOCK_N)
        else:
            skipped += pairs_of(keep, rows.real)
    return acc, l, m, skipped


@triton.jit
def pairs_of(keep, real):
    """How many pairs [M, N] of real rows there are."""
    return tl.sum(tl.sum((keep & real[:, None]).to(tl.int32), 1), 0)
