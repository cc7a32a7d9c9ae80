"""The kernel: shared memory, barriers, and which warps do what."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseprefill.kernels.attention.arguments import Lists, Mask, State
from sparseprefill.kernels.hopper.arguments import Cache, Outputs, Queries, Raw, Ring, Shape, Sizes, Skip, Work
from sparseprefill.kernels.hopper.consume import consume
from sparseprefill.kernels.hopper.convert import produce_converted
from sparseprefill.kernels.hopper.produce import produce
from sparseprefill.kernels.hopper.work import FIELDS, SLOTS, schedule

RUNTIME = (
    "stride_lb", "stride_lh", "q_offset", "q_len", "kv_len", "blocks", "tile_rows", "group_rows", "columns", "items",
    "heads", "kv_group", "draws",
)  # fmt: skip
"""Sizes that change from call to call and must not cause a compilation. They stay flat: this list does not reach into a
tuple."""


@gluon.jit
def fill(ring, raw, work, sizes, mask, cache, skip, shape):
    """The producer that the cache needs."""
    if shape.FP8 is None:
        produce(ring, work, sizes, mask, cache, skip, shape)
    else:
        produce_converted(ring, raw, work, sizes, mask, cache, shape)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("table_ptr",))
def hopper_attention_fwd_kernel(
    q_desc, k_desc, v_desc, k_ptr, v_ptr, table_ptr, k_scale_ptr, v_scale_ptr, starts_ptr, lengths_ptr, sinks_ptr,
    tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr,
    stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr, bitmap_ptr,
    carry_m_ptr, carry_l_ptr, carry_acc_ptr, out_ptr, lse_ptr, m_ptr, l_ptr, acc_ptr, nonfinite_ptr, next_ptr, order_ptr,
    below_ptr, skipped_ptr, requests_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh, scale,
    q_offset, q_len, kv_len, blocks, tile_rows, group_rows, columns, items, heads, kv_group, draws,
    TILE_Q: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr, REGISTERS: gl.constexpr,
    FP8: gl.constexpr, AHEAD: gl.constexpr, DEFER: gl.constexpr,
):  # fmt: skip
    """Block-sparse attention: each block of queries over the key tiles and the stripes that its lists name.

    A persistent kernel: as many programs as multiprocessors, and each draws query blocks until none is left. Sixteen
    warps play four roles: two consumers of four warps compute (the first is the default partition), a producer of four
    fetches keys and values, and a scheduler of one, whose warpgroup is padded, draws the blocks. Producer and consumers
    apart, and products that overlap with softmax, are FlashAttention-3's (Shah et al., 2024, Algorithms 1 and 2); lists
    of tiles and stripes, pages, and the scheduler are ours. How the roles talk is told in `arguments`.

    What a call lacks is None. FP8: see `Shape`. REGISTERS: per thread of consumer, producer, scheduler. DEFER: where
    steps may be left out (`below_ptr`), values of tiles are fetched when a consumer has said that it wants them. With
    `requests_ptr` batch rows are requests, each with sizes, lists and pages of its own: see `requests`.
    """
    dtype: gl.constexpr = q_desc.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M // 2, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], q_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], q_desc.layout)
    positions = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat)
    gathered: gl.constexpr = PAGE > 0 and stripe_indices_ptr is not None and FP8 is None
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
    skip = Skip(below_ptr, skipped_ptr, votes, told)
    shape: gl.constexpr = Shape(TILE_Q, TILE_K, GROUP, WIDTH, BLOCK_M, BLOCK_N, D, STAGES, PAGE, FP8, AHEAD)
    queries = Queries(q_desc, q_smem, q_ready, q_empty)
    ring = Ring(k_smem, v_smem, positions, k_ready, k_empty, v_ready, v_empty, cache_rows)
    work = Work(work_smem, work_ready, work_empty, next_ptr, order_ptr, draws)
    sizes = Sizes(starts_ptr, lengths_ptr, q_offset, q_len, kv_len, blocks, items, heads, kv_group, requests_ptr)
    tiles = Lists(tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr)
    stripes = Lists(stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr)
    mask = Mask(tiles, stripes, bitmap_ptr, tile_rows, group_rows, columns)
    cache = Cache(
        k_desc, v_desc, k_ptr, v_ptr, table_ptr, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn
    )
    carry, state = State(carry_m_ptr, carry_l_ptr, carry_acc_ptr), State(m_ptr, l_ptr, acc_ptr)
    raw = Raw(None, None)
    if FP8 is not None:
        spread: gl.constexpr = gl.SwizzledSharedLayout(4, max(128 // D, 1), min(D // 16, 8), [1, 0])
        raw_k = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, D // 4], spread)
        raw_v = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, D // 4], spread)
        raw = Raw(raw_k, raw_v)
    if k_scale_ptr is not None:
        scale *= gl.load(k_scale_ptr)
    v_scale = None
    if v_scale_ptr is not None:
        v_scale = gl.load(v_scale_ptr)
    outputs = Outputs(
        out_ptr,
        lse_ptr,
        state,
        nonfinite_ptr,
        sinks_ptr,
        v_scale,
        stride_ob,
        stride_oh,
        stride_on,
        stride_lb,
        stride_lh,
    )
    gl.warp_specialize(
        [
            (consume, (0, queries, ring, work, sizes, carry, outputs, skip, scale, shape)),
            (consume, (1, queries, ring, work, sizes, carry, outputs, skip, scale, shape)),
            (fill, (ring, raw, work, sizes, mask, cache, skip, shape)),
            (schedule, (queries, work, sizes, mask, shape)),
        ],
        [4, 4, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[2]],
    )
