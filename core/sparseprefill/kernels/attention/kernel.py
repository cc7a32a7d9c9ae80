"""The portable kernels: attention (tiles, stripes, carry-in, LSE or state out, and the repair of nonfinite blocks), and
the attention mass of its tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.attention.arguments import (
    BITMAP,
    COLUMNS,
    FIELDS,
    GROUP_ROWS,
    KV_LEN,
    OUT_BEGIN,
    Q_BEGIN,
    Q_LEN,
    Q_OFFSET,
    STRIPE_LISTS,
    TABLE,
    TILE_LISTS,
    TILE_ROWS,
    Cache,
    Head,
    Lists,
    Logits,
    Mask,
    Matrix,
    Outputs,
    Queries,
    Shape,
    Sizes,
    State,
    load_keys,
)
from sparseprefill.kernels.attention.block import attend
from sparseprefill.kernels.steps import LOG2E, batch_row, factor, floor_div, load_rows, logits

RUNTIME = (
    "outputs_stride_lb", "outputs_stride_lh", "sizes_q_offset", "sizes_q_len", "sizes_kv_len", "mask_tile_rows",
    "mask_group_rows", "mask_columns", "logits_window", "sizes_heads", "sizes_kv_group", "flags",
)  # fmt: skip
"""Sizes that change from call to call and must not cause a compilation."""
FLAGS = tl.constexpr(128)
"""Flags of query blocks that a repairing program reads at once."""


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("cache_table",))
def sparse_attention_fwd_kernel(
    queries_ptr, queries_stride_b, queries_stride_h, queries_stride_n,
    cache_k_ptr, cache_k_desc, cache_k_scale, cache_k_stride_b, cache_k_stride_h, cache_k_stride_n,
    cache_v_ptr, cache_v_desc, cache_v_scale, cache_v_stride_b, cache_v_stride_h, cache_v_stride_n, cache_table,
    mask_tiles_counts, mask_tiles_offsets, mask_tiles_indices,
    mask_stripes_counts, mask_stripes_offsets, mask_stripes_indices,
    mask_bitmap, mask_tile_rows, mask_group_rows, mask_columns,
    carry_m, carry_l, carry_acc,
    outputs_out, outputs_lse, outputs_state_m, outputs_state_l, outputs_state_acc,
    outputs_nonfinite, outputs_sinks, outputs_skipped,
    outputs_stride_ob, outputs_stride_oh, outputs_stride_on, outputs_stride_lb, outputs_stride_lh,
    sizes_starts, sizes_lengths, sizes_q_offset, sizes_q_len, sizes_kv_len, sizes_heads, sizes_kv_group, sizes_requests,
    logits_scale, logits_softcap, logits_window, logits_below, flags,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr,
    BLOCK_V: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """Attention of every query row over the keys that a mask of tiles and stripes selects, with online softmax.

    The loop is FlashAttention-2's (Dao, 2023, algorithm 1) over the key blocks of a list in place of all of them; masks
    of tiles and stripes, deduplication by a bitmap, and repair are ours. Pointers that are None leave their part out.
    The parameters are those of `Arguments`, and the constants those of `Shape`.

    Forward: a program per query block and head. REPAIR: programs walk the `flags` of query blocks and do those again
    that met a NaN, mostly none, with care for NaN and infinities of V in keys that a row may not see. With
    `logits_below` steps whose logits cannot matter are left out, and counted: see `block`. With `sizes_requests` a batch
    row is a request with sizes, lists and pages of its own: see `attend_request`.
    """
    queries = Queries(queries_ptr, queries_stride_b, queries_stride_h, queries_stride_n)
    k = Matrix(cache_k_ptr, cache_k_desc, cache_k_scale, cache_k_stride_b, cache_k_stride_h, cache_k_stride_n)
    v = Matrix(cache_v_ptr, cache_v_desc, cache_v_scale, cache_v_stride_b, cache_v_stride_h, cache_v_stride_n)
    cache = Cache(k, v, cache_table)
    tiles = Lists(mask_tiles_counts, mask_tiles_offsets, mask_tiles_indices)
    stripes = Lists(mask_stripes_counts, mask_stripes_offsets, mask_stripes_indices)
    mask = Mask(tiles, stripes, mask_bitmap, mask_tile_rows, mask_group_rows, mask_columns)
    carry = State(carry_m, carry_l, carry_acc)
    state = State(outputs_state_m, outputs_state_l, outputs_state_acc)
    outputs = Outputs(
        outputs_out, outputs_lse, state, outputs_nonfinite, outputs_sinks, outputs_skipped,
        outputs_stride_ob, outputs_stride_oh, outputs_stride_on, outputs_stride_lb, outputs_stride_lh,
    )  # fmt: skip
    sizes = Sizes(
        sizes_starts, sizes_lengths, sizes_q_offset, sizes_q_len, sizes_kv_len, sizes_heads, sizes_kv_group,
        sizes_requests,
    )  # fmt: skip
    logits = Logits(logits_scale, logits_softcap, logits_window, logits_below)
    shape: tl.constexpr = Shape(
        TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, V, BLOCK_V, PAGE
    )  # fmt: skip
    blocks = mask_tile_rows * (TILE_Q // BLOCK_M)
    if REPAIR:
        for first in range(tl.program_id(0) * FLAGS, flags, tl.num_programs(0) * FLAGS):
            at = first + tl.arange(0, FLAGS)
            raised = tl.load(outputs_nonfinite + at, mask=at < flags, other=0).to(tl.int32)  # [FLAGS]
            if tl.max(raised, 0) > 0:
                for j in range(FLAGS):
                    if tl.max(tl.where(tl.arange(0, FLAGS) == j, raised, 0), 0) > 0:
                        block, bh = (first + j) % blocks, (first + j) // blocks
                        run(block, bh, queries, cache, mask, carry, outputs, sizes, logits, shape, True, PRECISION)
    else:
        # Long rows first: with causal masks they do most work.
        block, bh = blocks - 1 - tl.program_id(0), tl.program_id(1)
        run(block, bh, queries, cache, mask, carry, outputs, sizes, logits, shape, False, PRECISION)


@triton.jit
def run(
    block, bh, queries, cache, mask, carry, outputs, sizes, logits, S, CAREFUL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """`attend`, for a head of a batch row or of a request."""
    if sizes.requests is not None:
        attend_request(block, bh, queries, cache, mask, carry, outputs, sizes, logits, S, CAREFUL, PRECISION)
    else:
        attend(block, bh, queries, cache, mask, carry, outputs, sizes, logits, S, CAREFUL, PRECISION)


@triton.jit
def attend_request(
    block, bh, queries, cache, mask, carry, outputs, sizes, logits, S, CAREFUL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """`attend` for head ``bh % heads`` of request ``bh // heads``, if that has so many query blocks.

    Flags of nonfinite blocks lie as if all requests had as many query tiles as the longest, `mask.tile_rows`.
    """
    request = sizes.requests + (bh // sizes.heads) * FIELDS
    h = bh % sizes.heads
    tile_rows = tl.load(request + TILE_ROWS).to(tl.int32)
    blocks: tl.constexpr = S.TILE_Q // S.BLOCK_M
    if block < tile_rows * blocks:
        q_ptr = queries.ptr + tl.load(request + Q_BEGIN) * queries.stride_n
        table = cache.table + tl.load(request + TABLE)
        tiles = mask.tiles
        if mask.tiles.counts is not None:
            tiles = Lists(
                mask.tiles.counts + tl.load(request + TILE_LISTS),
                mask.tiles.offsets + tl.load(request + TILE_LISTS + 1),
                mask.tiles.indices + tl.load(request + TILE_LISTS + 2),
            )
        stripes = mask.stripes
        if mask.stripes.counts is not None:
            stripes = Lists(
                mask.stripes.counts + tl.load(request + STRIPE_LISTS),
                mask.stripes.offsets + tl.load(request + STRIPE_LISTS + 1),
                mask.stripes.indices + tl.load(request + STRIPE_LISTS + 2),
            )
        bitmap = mask.bitmap
        if mask.bitmap is not None:
            bitmap = mask.bitmap + tl.load(request + BITMAP)
        group_rows = tl.load(request + GROUP_ROWS).to(tl.int32)
        columns = tl.load(request + COLUMNS).to(tl.int32)
        out_begin = tl.load(request + OUT_BEGIN)
        flags = bh.to(tl.int64) * mask.tile_rows - h.to(tl.int64) * tile_rows  # `attend` adds the head's own tiles
        attend(
            block, h,
            Queries(q_ptr, queries.stride_b, queries.stride_h, queries.stride_n),
            Cache(cache.k, cache.v, table),
            Mask(tiles, stripes, bitmap, tile_rows, group_rows, columns),
            carry,
            Outputs(
                outputs.out + out_begin * outputs.stride_on, outputs.lse + out_begin, outputs.state,
                outputs.nonfinite + flags * blocks, outputs.sinks, outputs.skipped,
                outputs.stride_ob, outputs.stride_oh, outputs.stride_on, outputs.stride_lb, outputs.stride_lh,
            ),
            Sizes(
                None, None, tl.load(request + Q_OFFSET).to(tl.int32), tl.load(request + Q_LEN).to(tl.int32),
                tl.load(request + KV_LEN).to(tl.int32), sizes.heads, sizes.kv_group, None,
            ),
            logits,
            S, CAREFUL, PRECISION,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=("q_offset", "q_len", "kv_len", "tile_rows", "columns", "window", "heads", "kv_group"),
    do_not_specialize_on_alignment=("table_ptr",),
)
def tile_mass_fwd_kernel(
    q_ptr, k_ptr, table_ptr, k_scale_ptr, lse_ptr, probe_ptr, mass_ptr, starts_ptr, lengths_ptr,
    tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    scale, softcap, window, q_offset, q_len, kv_len, tile_rows, columns, heads, kv_group,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The attention that falls on each listed tile, ``exp(s - lse)`` summed over its keys, averaged over its real rows.

    A program per query tile and head; heads that are not probed cost one load. The softmax is exact, since the LSE of
    the attention is there already (as in the backward pass of FlashAttention); the rest is ours.
    """
    bh = tl.program_id(1)
    if tl.load(probe_ptr + bh) == 0:
        return
    row = tile_rows - 1 - tl.program_id(0)
    b, h = bh // heads, bh % heads
    start, length, first = batch_row(b, starts_ptr, lengths_ptr, q_offset, kv_len)
    low = (floor_div(first, TILE_Q) + row) * TILE_Q
    top = tl.maximum(tl.maximum(low, first), 0)
    bottom = tl.minimum(tl.minimum(low + TILE_Q, first + q_len), length)
    if bottom <= top:
        return
    share = 1.0 / (bottom - top).to(tl.float32)
    k_base = k_ptr + b.to(tl.int64) * stride_kb + (h // kv_group).to(tl.int64) * stride_kh
    keys = Head(k_base, stride_kn, table_ptr, stride_kb, factor(k_scale_ptr))
    q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    row_of_lists = bh.to(tl.int64) * tile_rows + row
    list_ptr = tile_indices_ptr + tl.load(tile_offsets_ptr + row_of_lists)
    for t in range(tl.load(tile_counts_ptr + row_of_lists)):
        column = tl.load(list_ptr + t)
        total = 0.0
        for part in range(TILE_Q // BLOCK_M):
            position = low + part * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            real = (position >= top) & (position < bottom)
            q = load_rows(q_base, position - first, real, stride_qn, D, BLOCK_D)  # [BLOCK_M, BLOCK_D]
            lse_row = lse_ptr + bh.to(tl.int64) * q_len + position - first
            lse = tl.load(lse_row, mask=real, other=float("inf"))  # [BLOCK_M]
            for n in range(TILE_K // BLOCK_N):
                at = column * TILE_K + n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
                keep = (at[None, :] <= position[:, None]) & real[:, None]  # [BLOCK_M, BLOCK_N]
                if window is not None:
                    keep = keep & (position[:, None] - at[None, :] < window)
                there = at + start < kv_len
                k = load_keys(keys, at + start, there, q.dtype, PAGE, D, BLOCK_D)  # [BLOCK_N, BLOCK_D]
                s = logits(q, k, scale, softcap, softcap is not None, PRECISION)  # [BLOCK_M, BLOCK_N]
                p = tl.where(keep, tl.math.exp2(s - (lse * LOG2E)[:, None]), 0.0)  # [BLOCK_M, BLOCK_N]
                total += tl.sum(tl.sum(p, 1), 0)
        tl.store(mass_ptr + row_of_lists * columns + column, total * share)
