"""The kernel: shared memory, barriers, and which warps do what."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseprefill.kernels.attention.arguments import Lists, Mask, State
from sparseprefill.kernels.hopper.consume import consume
from sparseprefill.kernels.roles.arguments import (
    Cache,
    Eight,
    Outputs,
    Parts,
    Queries,
    Raw,
    Ring,
    Shape,
    Sizes,
    Skip,
    Work,
)
from sparseprefill.kernels.roles.convert import produce_converted
from sparseprefill.kernels.roles.gluon import reinterpret
from sparseprefill.kernels.roles.produce import produce
from sparseprefill.kernels.roles.work import FIELDS, SLOTS, schedule

RUNTIME = (
    "outputs_stride_lb", "outputs_stride_lh", "sizes_q_offset", "sizes_q_len", "sizes_kv_len", "sizes_blocks",
    "mask_tile_rows", "mask_group_rows", "mask_columns", "sizes_items", "sizes_heads", "sizes_kv_group", "draws",
)  # fmt: skip
"""Sizes that change from call to call and must not cause a compilation."""


@gluon.jit
def fill(ring, raw, eight, work, sizes, mask, cache, skip, shape):
    """The producer that the cache needs."""
    if shape.FP8 is None:
        produce(ring, eight, work, sizes, mask, cache, skip, shape)
    else:
        produce_converted(ring, raw, eight, work, sizes, mask, cache, shape)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("cache_table",))
def hopper_attention_fwd_kernel(
    queries, cache_k_desc, cache_v_desc, cache_k_box, cache_v_box, cache_k, cache_v, cache_table,
    cache_stride_kb, cache_stride_kh, cache_stride_kn, cache_stride_vb, cache_stride_vh, cache_stride_vn,
    mask_tiles_counts, mask_tiles_offsets, mask_tiles_indices,
    mask_stripes_counts, mask_stripes_offsets, mask_stripes_indices,
    mask_bitmap, mask_tile_rows, mask_group_rows, mask_columns,
    carry_m, carry_l, carry_acc,
    outputs_out, outputs_lse, outputs_state_m, outputs_state_l, outputs_state_acc,
    outputs_nonfinite, outputs_sinks, outputs_v_scale,
    outputs_stride_ob, outputs_stride_oh, outputs_stride_on, outputs_stride_lb, outputs_stride_lh,
    sizes_starts, sizes_lengths, sizes_q_offset, sizes_q_len, sizes_kv_len, sizes_blocks, sizes_items, sizes_heads,
    sizes_kv_group, sizes_requests,
    scale, k_scale, below, skipped, counter, order, draws, pieces, parts_arrived, parts_level, parts_acc,
    eight_k_desc, eight_v_desc, eight_k_scale, eight_k_mean, eight_v_scale, eight_v_inverse, eight_v_mean, eight_exact,
    TILE_Q: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, BOX: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, REGISTERS: gl.constexpr,
    FP8: gl.constexpr, AHEAD: gl.constexpr, DEFER: gl.constexpr, PRODUCERS: gl.constexpr,
):  # fmt: skip
    """Block-sparse attention: each block of queries over the key tiles and the stripes that its lists name.

    A persistent kernel: as many programs as multiprocessors, and each draws query blocks until none is left. Its warps
    play four roles: two consumers of four warps compute (the first is the default partition), a producer of PRODUCERS
    fetches keys and values (four where it gathers, one where the copy engine does), and a scheduler of one, whose
    warpgroup is padded, draws the blocks. Producer and consumers
    apart, and products that overlap with softmax, are FlashAttention-3's (Shah et al., 2024, Algorithms 1 and 2); lists
    of tiles and stripes, pages, and the scheduler are ours. How the roles talk is told in `arguments`.

    The parameters are those of `Arguments`; what a call lacks is None. FP8: see `Shape`. REGISTERS: per thread of
    consumer, producer, scheduler. DEFER: where steps may be left out (`below`), values of tiles are fetched when a
    consumer has said that it wants them. With `sizes_requests` batch rows are requests, each with sizes, lists and pages
    of its own: see `attention.arguments`. With `eight_k_desc` most steps of tiles are done in 8 bits, two of the others at
    once.
    """
    dtype: gl.constexpr = queries.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M // 2, D], queries.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], queries.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], queries.layout)
    positions = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat)
    gathered: gl.constexpr = PAGE > 0 and mask_stripes_indices is not None and FP8 is None and BOX == 0
    cache_rows = gl.allocate_shared_memory(gl.int32, [BLOCK_N if gathered else 1], flat)
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
    votes = None
    told = None
    if DEFER:
        votes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 1], flat)
        told = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], bar)
        for i in gl.static_range(2 * STAGES):
            mbarrier.init(told.index(i), count=1)
    skip = Skip(below, skipped, votes, told)
    shape: gl.constexpr = Shape(TILE_Q, TILE_K, GROUP, WIDTH, BOX, BLOCK_M, BLOCK_N, D, STAGES, PAGE, FP8, AHEAD)
    eight = Eight(
        eight_k_desc,
        eight_v_desc,
        eight_k_scale,
        eight_k_mean,
        eight_v_scale,
        eight_v_inverse,
        eight_v_mean,
        eight_exact,
    )
    q_eight = None
    k_eight = None
    v_eight = None
    scales = None
    if eight_k_desc is not None:
        rows: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
        q_eight = gl.allocate_shared_memory(gl.int8, [2, BLOCK_M // 2, D], rows)
        k_eight = reinterpret(k_smem, gl.int8, [STAGES, 1, 1, 2 * BLOCK_N, D], eight_k_desc.layout)
        v_eight = reinterpret(v_smem, gl.float8e4nv, [STAGES, 1, 1, D, 2 * BLOCK_N], eight_v_desc.layout)
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M // 2], flat)
    block = Queries(queries, q_smem, q_ready, q_empty, q_eight)
    ring = Ring(k_smem, v_smem, positions, k_ready, k_empty, v_ready, v_empty, cache_rows, k_eight, v_eight, scales)
    work = Work(work_smem, work_ready, work_empty, counter, order, draws, pieces)
    sizes = Sizes(
        sizes_starts, sizes_lengths, sizes_q_offset, sizes_q_len, sizes_kv_len, sizes_blocks, sizes_items, sizes_heads,
        sizes_kv_group, sizes_requests,
    )  # fmt: skip
    tiles = Lists(mask_tiles_counts, mask_tiles_offsets, mask_tiles_indices)
    stripes = Lists(mask_stripes_counts, mask_stripes_offsets, mask_stripes_indices)
    mask = Mask(tiles, stripes, mask_bitmap, mask_tile_rows, mask_group_rows, mask_columns)
    cache = Cache(
        cache_k_desc, cache_v_desc, cache_k_box, cache_v_box, cache_k, cache_v, cache_table,
        cache_stride_kb, cache_stride_kh, cache_stride_kn, cache_stride_vb, cache_stride_vh, cache_stride_vn,
    )  # fmt: skip
    parts = Parts(parts_arrived, parts_level, parts_acc)
    carry = State(carry_m, carry_l, carry_acc)
    state = State(outputs_state_m, outputs_state_l, outputs_state_acc)
    raw = Raw(None, None)
    if FP8 is not None:
        spread: gl.constexpr = gl.SwizzledSharedLayout(4, max(128 // D, 1), min(D // 16, 8), [1, 0])
        raw_k = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, D // 4], spread)
        raw_v = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, D // 4], spread)
        raw = Raw(raw_k, raw_v)
    if k_scale is not None:
        scale *= gl.load(k_scale)
    v_scale = None
    if outputs_v_scale is not None:
        v_scale = gl.load(outputs_v_scale)
    outputs = Outputs(
        outputs_out, outputs_lse, state, outputs_nonfinite, outputs_sinks, v_scale,
        outputs_stride_ob, outputs_stride_oh, outputs_stride_on, outputs_stride_lb, outputs_stride_lh,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (0, block, ring, eight, work, sizes, carry, parts, outputs, skip, scale, shape)),
            (consume, (1, block, ring, eight, work, sizes, carry, parts, outputs, skip, scale, shape)),
            (fill, (ring, raw, eight, work, sizes, mask, cache, skip, shape)),
            (schedule, (block, eight, work, sizes, mask, shape)),
        ],
        [4, PRODUCERS, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[2]],
    )
