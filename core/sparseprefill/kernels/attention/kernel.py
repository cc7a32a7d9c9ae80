"""The forward kernel (tiles, stripes, carry-in, LSE or state out), and the repair of blocks that met a NaN."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.attention.block import attend

RUNTIME = (
    "stride_lb",
    "stride_lh",
    "q_offset",
    "q_len",
    "kv_len",
    "tile_rows",
    "group_rows",
    "columns",
    "window",
    "heads",
    "kv_group",
)
UNALIGNED = ("table_ptr",)
FLAGS = tl.constexpr(128)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def sparse_attention_fwd_kernel(
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
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Long rows first: with causal masks they do most work.
    block = tile_rows * (TILE_Q // BLOCK_M) - 1 - tl.program_id(0)
    attend(
        block, tl.program_id(1),
        q_ptr, k_ptr, v_ptr, k_desc, v_desc, table_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr, sinks_ptr,
        tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr, stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr,
        chosen_ptr, carry_m_ptr, carry_l_ptr, carry_acc_ptr, out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, odd_ptr, stride_qb, stride_qh,
        stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob,
        stride_oh, stride_on, stride_lb, stride_lh, scale, softcap, q_offset, q_len,
        kv_len, tile_rows, group_rows, columns, window, heads, kv_group, TILE_Q, TILE_K, GROUP, BLOCK_M, BLOCK_N, D,
        BLOCK_D, HAS_TILES, HAS_STRIPES, DEDUPE, HAS_CARRY, STORE_STATE, HAS_STARTS, HAS_LENGTHS, HAS_SINKS, WINDOW,
        SOFTCAP, TMA, False, PAGE, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=(*RUNTIME, "total"), do_not_specialize_on_alignment=UNALIGNED)
def sparse_attention_repair_kernel(
    total,
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
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do again, with care for NaN and infinities of V, the blocks whose flag in `odd_ptr` is set; mostly none."""
    blocks = tile_rows * (TILE_Q // BLOCK_M)
    for first in range(tl.program_id(0) * FLAGS, total, tl.num_programs(0) * FLAGS):
        at = first + tl.arange(0, FLAGS)
        flags = tl.load(odd_ptr + at, mask=at < total, other=0).to(tl.int32)
        if tl.max(flags, 0) > 0:
            for j in range(FLAGS):
                if tl.max(tl.where(tl.arange(0, FLAGS) == j, flags, 0), 0) > 0:
                    attend(
                        (first + j) % blocks, (first + j) // blocks,
                        q_ptr, k_ptr, v_ptr, k_desc, v_desc, table_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr, sinks_ptr,
                        tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr, stripe_counts_ptr, stripe_offsets_ptr,
                        stripe_indices_ptr, chosen_ptr, carry_m_ptr, carry_l_ptr, carry_acc_ptr, out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, odd_ptr, stride_qb, stride_qh,
                        stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob,
                        stride_oh, stride_on, stride_lb, stride_lh, scale, softcap, q_offset, q_len,
                        kv_len, tile_rows, group_rows, columns, window, heads, kv_group, TILE_Q, TILE_K, GROUP, BLOCK_M, BLOCK_N, D,
                        BLOCK_D, HAS_TILES, HAS_STRIPES, DEDUPE, HAS_CARRY, STORE_STATE, HAS_STARTS, HAS_LENGTHS, HAS_SINKS, WINDOW,
                        SOFTCAP, TMA, True, PAGE, PRECISION,
                    )  # fmt: skip
