"""The portable attention kernel: tiles, stripes, carry-in, LSE or state out, and the repair of nonfinite blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.attention.arguments import Cache, Lists, Logits, Mask, Outputs, Queries, Shape, Sizes, State
from sparseprefill.kernels.attention.block import attend
from sparseprefill.kernels.attention.requests import attend_request

RUNTIME = (
    "stride_lb", "stride_lh", "q_offset", "q_len", "kv_len", "tile_rows", "group_rows", "columns", "window", "heads",
    "kv_group", "total",
)  # fmt: skip
"""Sizes that change from call to call and must not cause a compilation."""
FLAGS = tl.constexpr(128)
"""Flags of query blocks that a repairing program reads at once."""


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("table_ptr",))
def sparse_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, table_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr, sinks_ptr,
    tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr,
    stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr, bitmap_ptr,
    carry_m_ptr, carry_l_ptr, carry_acc_ptr,
    out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, nonfinite_ptr, below_ptr, skipped_ptr, requests_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh,
    scale, softcap, window, q_offset, q_len, kv_len, tile_rows, group_rows, columns, heads, kv_group, total,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """Attention of every query row over the keys that a mask of tiles and stripes selects, with online softmax.

    The loop is FlashAttention-2's (Dao, 2023, algorithm 1) over the key blocks of a list in place of all of them; masks
    of tiles and stripes, deduplication by a bitmap, and repair are ours. Pointers that are None leave their part out.

    Forward: a program per query block and head. REPAIR: programs walk the flags of the `total` query blocks and do
    those again that met a NaN, mostly none, with care for NaN and infinities of V in keys that a row may not see.
    With `below_ptr` steps whose logits cannot matter are left out, and counted: see `skip`. With `requests_ptr` a batch
    row is a request with sizes, lists and pages of its own: see `requests`.
    """
    queries = Queries(q_ptr, stride_qb, stride_qh, stride_qn)
    keys = Cache(k_ptr, k_desc, table_ptr, k_scale_ptr, stride_kb, stride_kh, stride_kn)
    values = Cache(v_ptr, v_desc, table_ptr, v_scale_ptr, stride_vb, stride_vh, stride_vn)
    tiles = Lists(tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr)
    stripes = Lists(stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr)
    mask = Mask(tiles, stripes, bitmap_ptr, tile_rows, group_rows, columns)
    carry = State(carry_m_ptr, carry_l_ptr, carry_acc_ptr)
    outputs = Outputs(
        out_ptr, lse_ptr, State(m_ptr, l_ptr, acc_ptr), nonfinite_ptr, sinks_ptr, skipped_ptr,
        stride_ob, stride_oh, stride_on, stride_lb, stride_lh,
    )  # fmt: skip
    sizes = Sizes(starts_ptr, lengths_ptr, q_offset, q_len, kv_len, heads, kv_group)
    logits = Logits(scale, softcap, window, below_ptr)
    blocks = tile_rows * (TILE_Q // BLOCK_M)
    if REPAIR:
        for first in range(tl.program_id(0) * FLAGS, total, tl.num_programs(0) * FLAGS):
            at = first + tl.arange(0, FLAGS)
            flags = tl.load(nonfinite_ptr + at, mask=at < total, other=0).to(tl.int32)  # [FLAGS]
            if tl.max(flags, 0) > 0:
                for j in range(FLAGS):
                    if tl.max(tl.where(tl.arange(0, FLAGS) == j, flags, 0), 0) > 0:
                        block, bh = (first + j) % blocks, (first + j) // blocks
                        if requests_ptr is not None:
                            attend_request(
                                block, bh, requests_ptr, queries, keys, values, mask, carry, outputs, sizes, logits,
                                Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE), True, PRECISION,
                            )  # fmt: skip
                        else:
                            attend(
                                block, bh, queries, keys, values, mask, carry, outputs, sizes, logits,
                                Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE), True, PRECISION,
                            )  # fmt: skip
    else:
        # Long rows first: with causal masks they do most work.
        block, bh = blocks - 1 - tl.program_id(0), tl.program_id(1)
        if requests_ptr is not None:
            attend_request(
                block, bh, requests_ptr, queries, keys, values, mask, carry, outputs, sizes, logits,
                Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE), False, PRECISION,
            )  # fmt: skip
        else:
            attend(
                block, bh, queries, keys, values, mask, carry, outputs, sizes, logits,
                Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE), False, PRECISION,
            )  # fmt: skip
