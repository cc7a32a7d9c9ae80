"""The portable attention kernel: tiles, stripes, carry-in, LSE or state out, and the repair of nonfinite blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.attention.arguments import (
    Cache,
    Lists,
    Logits,
    Mask,
    Matrix,
    Outputs,
    Queries,
    Shape,
    Sizes,
    State,
)
from sparseprefill.kernels.attention.block import attend
from sparseprefill.kernels.attention.requests import attend_request

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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """Attention of every query row over the keys that a mask of tiles and stripes selects, with online softmax.

    The loop is FlashAttention-2's (Dao, 2023, algorithm 1) over the key blocks of a list in place of all of them; masks
    of tiles and stripes, deduplication by a bitmap, and repair are ours. Pointers that are None leave their part out.
    The parameters are those of `Arguments`, and the constants those of `Shape`.

    Forward: a program per query block and head. REPAIR: programs walk the `flags` of query blocks and do those again
    that met a NaN, mostly none, with care for NaN and infinities of V in keys that a row may not see. With
    `logits_below` steps whose logits cannot matter are left out, and counted: see `skip`. With `sizes_requests` a batch
    row is a request with sizes, lists and pages of its own: see `requests`.
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
    blocks = mask_tile_rows * (TILE_Q // BLOCK_M)
    if REPAIR:
        for first in range(tl.program_id(0) * FLAGS, flags, tl.num_programs(0) * FLAGS):
            at = first + tl.arange(0, FLAGS)
            raised = tl.load(outputs_nonfinite + at, mask=at < flags, other=0).to(tl.int32)  # [FLAGS]
            if tl.max(raised, 0) > 0:
                for j in range(FLAGS):
                    if tl.max(tl.where(tl.arange(0, FLAGS) == j, raised, 0), 0) > 0:
                        block, bh = (first + j) % blocks, (first + j) // blocks
                        if sizes_requests is not None:
                            attend_request(
                                block, bh, queries, cache, mask, carry, outputs, sizes, logits,
                                Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE), True, PRECISION,
                            )  # fmt: skip
                        else:
                            attend(
                                block, bh, queries, cache, mask, carry, outputs, sizes, logits,
                                Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE), True, PRECISION,
                            )  # fmt: skip
    else:
        # Long rows first: with causal masks they do most work.
        block, bh = blocks - 1 - tl.program_id(0), tl.program_id(1)
        if sizes_requests is not None:
            attend_request(
                block, bh, queries, cache, mask, carry, outputs, sizes, logits,
                Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE), False, PRECISION,
            )  # fmt: skip
        else:
            attend(
                block, bh, queries, cache, mask, carry, outputs, sizes, logits,
                Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, BLOCK_D, PAGE), False, PRECISION,
            )  # fmt: skip
