"""The producer: key tiles through the copy engine, single key columns gathered row by row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparseprefill.kernels.hopper.gluon import barrier, load_block, load_rows
from sparseprefill.kernels.hopper.paging import boxes, entries_of, load_pages, row_in_cache
from sparseprefill.kernels.hopper.work import (
    CROSSING,
    ITEM,
    SEEN,
    SLOTS,
    STRIPE_LIST,
    TILE_LIST,
    TILES,
    WHOLE,
    get,
    get_wide,
)

HIDDEN = gl.constexpr(-2147483648)
"""Set in a gathered column's position where no row may see it; as an unsigned number beyond every row."""


@gluon.jit
def gather(smem, at_stage, base, stride, dims, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Start copying the rows that `at_stage` names."""
    rows = (at_stage.load(ROWS) & 0x7FFFFFFF).to(gl.uint32, bitcast=True)
    # One widening product: signed 64-bit arithmetic would cost the producer three times the instructions.
    where = (rows.to(gl.uint64) * stride.to(gl.uint32, bitcast=True).to(gl.uint64)).to(gl.int64)
    load_rows(smem.reshape([BLOCK_N, D]), base + where[:, None] + dims[None, :])
    async_copy.commit_group()


@gluon.jit
def hand_over(ready, PENDING: gl.constexpr):
    """Tell the consumers that all but the last PENDING copies have landed."""
    async_copy.wait_group(PENDING)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def produce(
    k_smem, v_smem, at_smem, from_smem, work_smem, k_ready, k_empty, v_ready, v_empty, work_ready, work_empty,
    k_desc, v_desc, k_ptr, v_ptr, table_ptr, starts_ptr, tile_indices_ptr, stripe_indices_ptr, chosen_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    kv_len, blocks, tile_rows, columns, items, heads, kv_group,
    TILE_Q: gl.constexpr, TILE_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, HAS_TILES: gl.constexpr, HAS_STRIPES: gl.constexpr, DEDUPE: gl.constexpr,
    HAS_STARTS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Four warps. Steps of an item: its tiles from the last to the first, then its stripes, BLOCK_N at a time.

    K and V of a step lie in a ring of STAGES. Where rows need a mask, `at_smem` names the positions of the keys.
    PAGE: tokens of a page, a power of two, or 0; with pages, stripes are gathered from the rows that `from_smem` names,
    where `stride_kb` rows lie between two pages.
    """
    if PAGE > 0:
        k_boxes = boxes(k_smem, STAGES, BLOCK_N, D, PAGE)
        v_boxes = boxes(v_smem, STAGES, BLOCK_N, D, PAGE)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    block: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, block)
    parts: gl.constexpr = TILE_K // BLOCK_N
    number = gl.arange(0, BLOCK_N, layout=line)
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, block))
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    going = True
    while going:
        mbarrier.wait(work_ready.index(slot), turn)
        item = get(work_smem, slot, ITEM)
        tiles = get(work_smem, slot, TILES)
        crossing = get(work_smem, slot, CROSSING)
        seen = get(work_smem, slot, SEEN)
        whole = get(work_smem, slot, WHOLE)
        tile_ptr = tile_indices_ptr
        if HAS_TILES:
            tile_ptr = tile_indices_ptr + get_wide(work_smem, slot, TILE_LIST)
        stripe_ptr = stripe_indices_ptr
        if HAS_STRIPES:
            stripe_ptr = stripe_indices_ptr + get_wide(work_smem, slot, STRIPE_LIST)
        mbarrier.arrive(work_empty.index(slot), count=1)
        slot += 1
        if slot == SLOTS:
            slot = 0
            turn ^= 1
        going = item < items
        if going:
            bh = item // blocks
            b = bh // heads
            hk = (bh % heads) // kv_group
            start = 0
            if HAS_STARTS:
                start = gl.load(starts_ptr + b)
            if HAS_TILES:
                entry = gl.load(tile_ptr + (tiles - 1) // parts, mask=tiles > 0, other=0)
                for j in range(tiles):
                    key = entry * TILE_K + ((tiles - 1 - j) % parts) * BLOCK_N
                    entry = gl.load(tile_ptr + gl.maximum(tiles - 2 - j, 0) // parts)
                    if PAGE > 0:  # early: their latency passes while the stage empties
                        entries = entries_of(table_ptr, key, kv_len, BLOCK_N, PAGE)
                    mbarrier.wait(k_empty.index(stage), phase)
                    if j < crossing:
                        at_smem.index(stage).store(key + number)
                        barrier()
                    mbarrier.expect(k_ready.index(stage), BLOCK_N * D * 2)
                    if PAGE > 0:
                        load_pages(k_desc, entries, hk, key, k_ready.index(stage), k_boxes, stage, BLOCK_N, D, PAGE)
                    else:
                        load_block(k_desc, [b, hk, key + start, 0], k_ready.index(stage), k_smem.index(stage))
                    mbarrier.wait(v_empty.index(stage), phase)
                    mbarrier.expect(v_ready.index(stage), BLOCK_N * D * 2)
                    if PAGE > 0:
                        load_pages(v_desc, entries, hk, key, v_ready.index(stage), v_boxes, stage, BLOCK_N, D, PAGE)
                    else:
                        load_block(v_desc, [b, hk, key + start, 0], v_ready.index(stage), v_smem.index(stage))
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        phase ^= 1
            if HAS_STRIPES:
                k_base = k_ptr + b.to(gl.int64) * stride_kb + hk.to(gl.int64) * stride_kh
                v_base = v_ptr + b.to(gl.int64) * stride_vb + hk.to(gl.int64) * stride_vh
                if HAS_STARTS:
                    k_base += gl.load(starts_ptr + b).to(gl.int64) * stride_kn
                    v_base += gl.load(starts_ptr + b).to(gl.int64) * stride_vn
                chunks = gl.cdiv(seen, BLOCK_N)
                at = gl.load(stripe_ptr + gl.minimum(number, seen - 1), mask=number * 0 < seen, other=0)
                if PAGE > 0:
                    there = row_in_cache(table_ptr, at, stride_kb, PAGE)
                before = 0
                for j in range(chunks):
                    if j >= whole:
                        keep = j * BLOCK_N + number < seen
                        if DEDUPE:
                            row = bh.to(gl.int64) * tile_rows + (blocks - 1 - item % blocks) // (TILE_Q // BLOCK_M)
                            keep = keep & (gl.load(chosen_ptr + row * columns + at // TILE_K) == 0)
                        at = gl.where(keep, at, at | HIDDEN)
                    mbarrier.wait(k_empty.index(stage), phase)
                    at_smem.index(stage).store(at)
                    rows = at_smem.index(stage)
                    if PAGE > 0:
                        from_smem.store(there)
                        rows = from_smem
                    barrier()
                    at = gl.load(stripe_ptr + gl.minimum((j + 1) * BLOCK_N + number, seen - 1))
                    gather(k_smem.index(stage), rows, k_base, stride_kn, dims, by_row, BLOCK_N, D)
                    if j > 0:
                        hand_over(k_ready.index(before), 2)
                    if PAGE > 0:
                        there = row_in_cache(table_ptr, at, stride_kb, PAGE)
                    mbarrier.wait(v_empty.index(stage), phase)
                    gather(v_smem.index(stage), rows, v_base, stride_vn, dims, by_row, BLOCK_N, D)
                    if j > 0:
                        hand_over(v_ready.index(before), 2)
                    elif PAGE > 0:
                        barrier()  # nobody reads `from_smem` any more
                    before = stage
                    stage += 1
                    if stage == STAGES:
                        stage = 0
                        phase ^= 1
                if chunks > 0:
                    hand_over(k_ready.index(before), 1)
                    hand_over(v_ready.index(before), 0)
