"""What one program does: attention of one query block of one head over its tiles and stripes."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.steps import (
    LN2,
    LOG2E,
    count_up_to,
    crossing_steps,
    floor_div,
    load_keys,
    load_rows,
    masked_step,
    step,
)


@triton.jit
def attend(
    block, bh,
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, table_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr, sinks_ptr,
    tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr,
    stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr, chosen_ptr,
    carry_m_ptr, carry_l_ptr, carry_acc_ptr,
    out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, odd_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh,
    scale, softcap, q_offset, q_len, kv_len, tile_rows, group_rows, columns, window, heads, kv_group,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_TILES: tl.constexpr, HAS_STRIPES: tl.constexpr, DEDUPE: tl.constexpr, HAS_CARRY: tl.constexpr,
    STORE_STATE: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr, CAREFUL: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Query block `block` (of BLOCK_M rows) of head `bh`. CAREFUL: see `masked_step`.

    PAGE: 0, or tokens of a page; then there is one batch row, whose strides are those of pages (see `load_keys`).
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    blocks: tl.constexpr = TILE_Q // BLOCK_M
    b, h = bh // heads, bh % heads
    hk = h // kv_group
    row = block // blocks
    row_of_lists = bh.to(tl.int64) * tile_rows + row

    start = 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + b)
    length = kv_len - start
    if HAS_LENGTHS:
        length = tl.load(lengths_ptr + b)
    first = q_offset - start
    tile = floor_div(first, TILE_Q) + row
    low = tile * TILE_Q + (block % blocks) * BLOCK_M
    position = low + tl.arange(0, BLOCK_M)
    index = position - first
    real = (index >= 0) & (index < q_len) & (position >= 0) & (position < length)
    last = tl.minimum(tl.minimum(low + BLOCK_M, first + q_len), length) - 1
    live = (low + BLOCK_M > 0) & (low + BLOCK_M > first) & (last >= low)

    k_base = k_ptr + b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh
    v_base = v_ptr + b.to(tl.int64) * stride_vb + hk.to(tl.int64) * stride_vh
    q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    q = load_rows(q_base, index, real, stride_qn, D, BLOCK_D)  # [BLOCK_M, D]
    out_row = bh.to(tl.int64) * q_len + index
    dims = tl.arange(0, BLOCK_D)
    inside = (index >= 0) & (index < q_len)
    if D == BLOCK_D:
        inside_out = inside[:, None]
    else:
        inside_out = inside[:, None] & (dims < D)[None, :]

    if HAS_CARRY:
        m = tl.load(carry_m_ptr + out_row, mask=inside, other=float("-inf")) * LOG2E
        l = tl.load(carry_l_ptr + out_row, mask=inside, other=0.0)  # noqa: E741
        acc = tl.load(carry_acc_ptr + out_row[:, None] * D + dims[None, :], mask=inside_out, other=0.0)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    if HAS_TILES:
        parts: tl.constexpr = TILE_K // BLOCK_N
        offset = tl.load(tile_offsets_ptr + row_of_lists)
        steps = tl.where(live, tl.load(tile_counts_ptr + row_of_lists), 0) * parts
        list_ptr = tile_indices_ptr + offset
        whole = 0
        if not WINDOW:
            whole = steps - crossing_steps(list_ptr, steps // parts, low, TILE_Q, TILE_K, BLOCK_N)
        for j in tl.range(0, whole):
            key = tl.load(list_ptr + j // parts) * TILE_K + (j % parts) * BLOCK_N + start
            if TMA:
                k = k_desc.load([b, hk, key, 0]).reshape([BLOCK_N, BLOCK_D])
                v = v_desc.load([b, hk, key, 0]).reshape([BLOCK_N, BLOCK_D])
            else:
                at = key + tl.arange(0, BLOCK_N)
                k = load_keys(
                    k_base, at, at < kv_len, stride_kn, table_ptr, stride_kb, k_scale_ptr, dtype, PAGE, D, BLOCK_D
                )  # fmt: skip
                v = load_keys(
                    v_base, at, at < kv_len, stride_vn, table_ptr, stride_vb, v_scale_ptr, dtype, PAGE, D, BLOCK_D
                )  # fmt: skip
            acc, l, m = step(acc, l, m, q, k, v, scale, softcap, SOFTCAP, PRECISION)
        for j in tl.range(whole, steps, num_stages=1):
            at = tl.load(list_ptr + j // parts) * TILE_K + (j % parts) * BLOCK_N + tl.arange(0, BLOCK_N)
            keep = at[None, :] <= position[:, None]
            if WINDOW:
                keep = keep & (position[:, None] - at[None, :] < window)
            k = load_keys(
                k_base, at + start, at + start < kv_len, stride_kn, table_ptr, stride_kb, k_scale_ptr, dtype, PAGE, D, BLOCK_D
            )  # fmt: skip
            v = load_keys(
                v_base, at + start, at + start < kv_len, stride_vn, table_ptr, stride_vb, v_scale_ptr, dtype, PAGE, D, BLOCK_D
            )  # fmt: skip
            acc, l, m = masked_step(acc, l, m, q, k, v, keep, scale, softcap, SOFTCAP, PRECISION, CAREFUL, BLOCK_N)

    if HAS_STRIPES:
        group = floor_div(tile, GROUP) - floor_div(first, TILE_Q * GROUP)
        row_of_stripes = bh.to(tl.int64) * group_rows + group
        offset = tl.load(stripe_offsets_ptr + row_of_stripes, mask=live, other=0)
        count = tl.load(stripe_counts_ptr + row_of_stripes, mask=live, other=0)
        seen = count_up_to(stripe_indices_ptr, offset, count, last)
        whole = 0
        if not WINDOW:
            whole = count_up_to(stripe_indices_ptr, offset, seen, low) // BLOCK_N
        list_ptr = stripe_indices_ptr + offset
        number = tl.arange(0, BLOCK_N)
        if DEDUPE:
            for j in tl.range(0, whole):
                at = tl.load(list_ptr + j * BLOCK_N + number)
                k = load_keys(
                    k_base, at + start, number >= 0, stride_kn, table_ptr, stride_kb, k_scale_ptr, dtype, PAGE, D, BLOCK_D
                )  # fmt: skip
                v = load_keys(
                    v_base, at + start, number >= 0, stride_vn, table_ptr, stride_vb, v_scale_ptr, dtype, PAGE, D, BLOCK_D
                )  # fmt: skip
                free = tl.load(chosen_ptr + row_of_lists * columns + at // TILE_K) == 0
                acc, l, m = masked_step(
                    acc, l, m, q, k, v, free[None, :], scale, softcap, SOFTCAP, PRECISION, CAREFUL, BLOCK_N
                )
        else:
            for j in tl.range(0, whole):
                at = tl.load(list_ptr + j * BLOCK_N + number) + start
                k = load_keys(
                    k_base, at, number >= 0, stride_kn, table_ptr, stride_kb, k_scale_ptr, dtype, PAGE, D, BLOCK_D
                )  # fmt: skip
                v = load_keys(
                    v_base, at, number >= 0, stride_vn, table_ptr, stride_vb, v_scale_ptr, dtype, PAGE, D, BLOCK_D
                )  # fmt: skip
                acc, l, m = step(acc, l, m, q, k, v, scale, softcap, SOFTCAP, PRECISION)
        for j in tl.range(whole, tl.cdiv(seen, BLOCK_N), num_stages=1):
            some = j * BLOCK_N + number < seen
            at = tl.load(list_ptr + j * BLOCK_N + number, mask=some, other=0)
            if DEDUPE:
                taken = tl.load(chosen_ptr + row_of_lists * columns + at // TILE_K, mask=some, other=1)
                some = some & (taken == 0)
            keep = some[None, :] & (at[None, :] <= position[:, None])
            if WINDOW:
                keep = keep & (position[:, None] - at[None, :] < window)
            k = load_keys(
                k_base, at + start, some, stride_kn, table_ptr, stride_kb, k_scale_ptr, dtype, PAGE, D, BLOCK_D
            )  # fmt: skip
            v = load_keys(
                v_base, at + start, some, stride_vn, table_ptr, stride_vb, v_scale_ptr, dtype, PAGE, D, BLOCK_D
            )  # fmt: skip
            acc, l, m = masked_step(acc, l, m, q, k, v, keep, scale, softcap, SOFTCAP, PRECISION, CAREFUL, BLOCK_N)

    if not CAREFUL:
        odd = tl.max(tl.where((acc != acc) & real[:, None], 1, 0))
        tl.store(odd_ptr + bh.to(tl.int64) * tile_rows * blocks + block, odd.to(tl.int8))
    m = tl.where(real, m, float("-inf"))
    l = tl.where(real, l, 0.0)  # noqa: E741
    if STORE_STATE:
        tl.store(m_ptr + out_row, m * LN2, mask=inside)
        tl.store(l_ptr + out_row, l, mask=inside)
        acc = tl.where(real[:, None], acc, 0.0)
        tl.store(acc_ptr + out_row[:, None] * D + dims[None, :], acc, mask=inside_out)
    else:
        lse = tl.where(l == 0.0, float("-inf"), (m + tl.math.log2(tl.where(l == 0.0, 1.0, l))) * LN2)
        tl.store(lse_ptr + b.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh + index, lse, mask=inside)
        total = l
        if HAS_SINKS:
            base = tl.where(m == float("-inf"), 0.0, m)
            total += tl.math.exp2(tl.load(sinks_ptr + h).to(tl.float32) * LOG2E - base)
        out = tl.where(real[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
        out_base = out_ptr + b.to(tl.int64) * stride_ob + h.to(tl.int64) * stride_oh
        where = out_base + index.to(tl.int64)[:, None] * stride_on + dims[None, :]
        tl.store(where, out.to(out_ptr.dtype.element_ty), mask=inside_out)
