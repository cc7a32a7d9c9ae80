"""The kernel: shared memory, barriers, and which warps do what."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseprefill.kernels.hopper.consume import consume
from sparseprefill.kernels.hopper.produce import produce
from sparseprefill.kernels.hopper.work import FIELDS, SLOTS, schedule

RUNTIME = (
    "stride_lb", "stride_lh", "q_offset", "q_len", "kv_len", "blocks", "tile_rows", "group_rows", "columns", "items",
    "heads", "kv_group",
)  # fmt: skip
"""Sizes that change from call to call and must not cause a compilation."""


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("table_ptr",))
def hopper_attention_fwd_kernel(
    q_desc, k_desc, v_desc, k_ptr, v_ptr, table_ptr, starts_ptr, lengths_ptr, sinks_ptr,
    tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr,
    stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr, chosen_ptr,
    carry_m_ptr, carry_l_ptr, carry_acc_ptr, out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, odd_ptr, next_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh, scale,
    q_offset, q_len, kv_len, blocks, tile_rows, group_rows, columns, items, heads, kv_group,
    TILE_Q: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, HAS_TILES: gl.constexpr, HAS_STRIPES: gl.constexpr, DEDUPE: gl.constexpr,
    HAS_CARRY: gl.constexpr, STORE_STATE: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_SINKS: gl.constexpr, PAGE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """As many programs as multiprocessors; each draws query blocks until none is left.

    Sixteen warps: two consumers of four (the first is the default partition), a producer of four and the scheduler's one,
    whose warpgroup is padded. REGISTERS: per thread of consumer, producer, scheduler. PAGE: see `produce`.
    """
    dtype: gl.constexpr = q_desc.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M // 2, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    at_smem = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat)
    from_smem = gl.allocate_shared_memory(gl.int32, [BLOCK_N if PAGE > 0 and HAS_STRIPES else 1], flat)
    work_smem = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], flat)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    work_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bar)
    work_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bar)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(work_ready.index(i), count=1)
        mbarrier.init(work_empty.index(i), count=3)
    gl.warp_specialize(
        [
            (consume, (
                q_smem, k_smem, v_smem, at_smem, work_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                work_ready, work_empty, starts_ptr, lengths_ptr, sinks_ptr, carry_m_ptr, carry_l_ptr, carry_acc_ptr,
                out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, odd_ptr,
                stride_ob, stride_oh, stride_on, stride_lb, stride_lh, scale,
                q_offset, q_len, kv_len, blocks, items, heads,
                0, TILE_Q, BLOCK_M, BLOCK_N, D, STAGES, HAS_CARRY, STORE_STATE, HAS_STARTS, HAS_LENGTHS, HAS_SINKS,
            )),
            (consume, (
                q_smem, k_smem, v_smem, at_smem, work_smem, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                work_ready, work_empty, starts_ptr, lengths_ptr, sinks_ptr, carry_m_ptr, carry_l_ptr, carry_acc_ptr,
                out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, odd_ptr,
                stride_ob, stride_oh, stride_on, stride_lb, stride_lh, scale,
                q_offset, q_len, kv_len, blocks, items, heads,
                1, TILE_Q, BLOCK_M, BLOCK_N, D, STAGES, HAS_CARRY, STORE_STATE, HAS_STARTS, HAS_LENGTHS, HAS_SINKS,
            )),
            (produce, (
                k_smem, v_smem, at_smem, from_smem, work_smem, k_ready, k_empty, v_ready, v_empty, work_ready, work_empty,
                k_desc, v_desc, k_ptr, v_ptr, table_ptr, starts_ptr, tile_indices_ptr, stripe_indices_ptr, chosen_ptr,
                stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                kv_len, blocks, tile_rows, columns, items, heads, kv_group,
                TILE_Q, TILE_K, BLOCK_M, BLOCK_N, D, STAGES, HAS_TILES, HAS_STRIPES, DEDUPE, HAS_STARTS, PAGE,
            )),
            (schedule, (
                q_smem, work_smem, q_ready, q_empty, work_ready, work_empty, q_desc, starts_ptr, lengths_ptr,
                tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr, stripe_counts_ptr, stripe_offsets_ptr,
                stripe_indices_ptr, next_ptr, q_offset, q_len, kv_len, blocks, tile_rows, group_rows, items, heads,
                TILE_Q, TILE_K, GROUP, BLOCK_M, BLOCK_N, D, HAS_TILES, HAS_STRIPES, DEDUPE, HAS_STARTS, HAS_LENGTHS,
            )),
        ],
        [4, 4, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[2]],
    )  # fmt: skip
