"""Attention mass of each selected tile, from the LSE: exact, for the heads that a plan probes."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.attention.arguments import Head, load_keys
from sparseprefill.kernels.steps import LOG2E, batch_row, factor, floor_div, load_rows, logits


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
