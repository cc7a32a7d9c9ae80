"""The producer: key tiles through the copy engine, key columns gathered row by row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparseprefill.kernels.attention.arguments import BITMAP, COLUMNS, TABLE, TILE_ROWS
from sparseprefill.kernels.roles.fetch import fetch
from sparseprefill.kernels.roles.gluon import barrier, load_block, load_rows
from sparseprefill.kernels.roles.paging import (
    batch_row,
    boxes,
    boxes_of_columns,
    entries_of,
    head_of,
    keys_of,
    load_boxes,
    load_step,
    own,
    own_size,
    row_in_cache,
)
from sparseprefill.kernels.roles.quantise import TILE
from sparseprefill.kernels.roles.ring import advance
from sparseprefill.kernels.roles.work import SLOTS, column_keys, query_block, take

HIDDEN = gl.constexpr(-2147483648)
"""Set in a gathered column's position where no row may see it; as an unsigned number beyond every row."""


@gluon.jit
def gather(smem, numbers, base, stride, dims, LAYOUT: gl.constexpr, shape):
    """Start copying the rows that `numbers` names into one stage, 16 bytes a lane."""
    rows = (numbers.load(LAYOUT) & 0x7FFFFFFF).to(gl.uint32, bitcast=True)  # [BLOCK_N]
    # One widening product: signed 64-bit arithmetic would cost the producer three times the instructions.
    where = (rows.to(gl.uint64) * stride.to(gl.uint32, bitcast=True).to(gl.uint64)).to(gl.int64)
    load_rows(smem.reshape([shape.BLOCK_N, shape.D]), base + where[:, None] + dims[None, :])  # [BLOCK_N, D]
    async_copy.commit_group()


@gluon.jit
def hand_over(ready, PENDING: gl.constexpr):
    """Tell the consumers that all but the last PENDING copies have landed."""
    async_copy.wait_group(PENDING)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def send_tiles(
    ring, cache, tile_ptr, table, begin, end, tiles, crossing, b, hk, start, kv_len, k_boxes, v_boxes, stage, phase,
    shape,
):  # fmt: skip
    """Fetch steps `begin` up to `end` of the `tiles` of an item. The slot behind them and its phase."""
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    parts: gl.constexpr = shape.TILE_K // BLOCK_N
    number = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    entry = gl.load(tile_ptr + (tiles - 1 - begin) // parts, mask=tiles > begin, other=0)
    for j in range(begin, end):
        key = entry * shape.TILE_K + ((tiles - 1 - j) % parts) * BLOCK_N
        entry = gl.load(tile_ptr + gl.maximum(tiles - 2 - j, 0) // parts)
        entries = ()
        if shape.PAGE > 0:  # early: their latency passes while the stage empties
            entries = entries_of(table, key, kv_len, shape)
        mbarrier.wait(ring.k_empty.index(stage), phase)
        if j < crossing:
            ring.positions.index(stage).store(key + number)
            barrier()
        ready = ring.k_ready.index(stage)
        load_step(cache.k_desc, entries, b, hk, key, start, ready, k_boxes, stage, shape)
        mbarrier.wait(ring.v_empty.index(stage), phase)
        ready = ring.v_ready.index(stage)
        load_step(cache.v_desc, entries, b, hk, key, start, ready, v_boxes, stage, shape)
        stage, phase = advance(stage, phase, shape.STAGES)
    return stage, phase


@gluon.jit
def send_columns(
    ring, cache, stripe_ptr, bitmap_ptr, table, seen, unmasked, b, hk, start, k_boxes, v_boxes, stage, phase, shape
):  # fmt: skip
    """Fetch the steps of an item's stripes through the copy engine, a box at a time. The slot behind them and its phase.

    bitmap_ptr: the query tile's row of the map of tiles, whose columns do not count; None where there are none.
    """
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    number = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for j in range(gl.cdiv(seen, BLOCK_N)):
        # early: their latency passes while the stage empties
        outer, inner = boxes_of_columns(stripe_ptr, table, j * BLOCK_N, seen, b, start, shape)
        mbarrier.wait(ring.k_empty.index(stage), phase)
        if j >= unmasked:
            at = column_keys(stripe_ptr, gl.minimum(j * BLOCK_N + number, seen - 1), shape.WIDTH)  # [BLOCK_N]
            keep = j * BLOCK_N + number < seen
            if bitmap_ptr is not None:
                keep = keep & (gl.load(bitmap_ptr + at // shape.TILE_K) == 0)
            ring.positions.index(stage).store(gl.where(keep, at, at | HIDDEN))
            barrier()
        load_boxes(cache.k_box, outer, inner, hk, ring.k_ready.index(stage), k_boxes, stage, shape)
        mbarrier.wait(ring.v_empty.index(stage), phase)
        load_boxes(cache.v_box, outer, inner, hk, ring.v_ready.index(stage), v_boxes, stage, shape)
        stage, phase = advance(stage, phase, shape.STAGES)
    return stage, phase


@gluon.jit
def gather_columns(
    ring, cache, stripe_ptr, bitmap_ptr, table, seen, unmasked, b, hk, start, stage, phase, sizes, shape
):  # fmt: skip
    """The work of `send_columns` for columns of any width: row by row, with asynchronous copies. Consumers are told of a
    step while the next one's copies are under way; `PAGE`: rows are where `ring.cache_rows` says."""
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    D: gl.constexpr = shape.D
    block: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, block)
    number = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, block))
    if sizes.requests is not None:
        b = b * 0  # the cache is one
    k_base = cache.k + b.to(gl.int64) * cache.stride_kb + hk.to(gl.int64) * cache.stride_kh
    v_base = cache.v + b.to(gl.int64) * cache.stride_vb + hk.to(gl.int64) * cache.stride_vh
    if sizes.starts is not None:
        k_base += start.to(gl.int64) * cache.stride_kn
        v_base += start.to(gl.int64) * cache.stride_vn
    chunks = gl.cdiv(seen, BLOCK_N)
    at = column_keys(stripe_ptr, gl.minimum(number, seen - 1), shape.WIDTH, some=number * 0 < seen)
    if shape.PAGE > 0:
        there = row_in_cache(table, at, cache.stride_kb, shape.PAGE)  # [BLOCK_N]
    before = 0
    for j in range(chunks):
        if j >= unmasked:
            keep = j * BLOCK_N + number < seen
            if bitmap_ptr is not None:
                keep = keep & (gl.load(bitmap_ptr + at // shape.TILE_K) == 0)
            at = gl.where(keep, at, at | HIDDEN)
        mbarrier.wait(ring.k_empty.index(stage), phase)
        ring.positions.index(stage).store(at)
        numbers = ring.positions.index(stage)
        if shape.PAGE > 0:
            ring.cache_rows.store(there)
            numbers = ring.cache_rows
        barrier()
        following = gl.minimum((j + 1) * BLOCK_N + number, seen - 1)
        at = column_keys(stripe_ptr, following, shape.WIDTH)  # [BLOCK_N]
        gather(ring.k_smem.index(stage), numbers, k_base, cache.stride_kn, dims, by_row, shape)
        if j > 0:
            hand_over(ring.k_ready.index(before), 2)
        if shape.PAGE > 0:
            there = row_in_cache(table, at, cache.stride_kb, shape.PAGE)  # [BLOCK_N]
        mbarrier.wait(ring.v_empty.index(stage), phase)
        gather(ring.v_smem.index(stage), numbers, v_base, cache.stride_vn, dims, by_row, shape)
        if j > 0:
            hand_over(ring.v_ready.index(before), 2)
        elif shape.PAGE > 0:
            barrier()  # nobody reads `ring.cache_rows` any more
        before = stage
        stage, phase = advance(stage, phase, shape.STAGES)
    if chunks > 0:
        hand_over(ring.k_ready.index(before), 1)
        hand_over(ring.v_ready.index(before), 0)
    return stage, phase


@gluon.jit
def send_eight(ring, eight, head, kv_heads, columns, tile_ptr, steps, stage, phase, shape):
    """The producer's part: `steps` tiles, from the one at `tile_ptr` back, with their factors. The slot behind them and
    its phase."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    none = 0.0 * gl.arange(0, shape.BLOCK_M // 2, layout=line)  # [half]
    entry = gl.load(tile_ptr)
    factor = gl.load(eight.k_scale + head * columns + entry)
    for j in range(steps):
        key = entry * TILE
        entry = gl.load(tile_ptr - gl.minimum(j + 1, steps - 1))
        mbarrier.wait(ring.k_empty.index(stage), phase)
        ring.scales.index(stage).store(factor + none)
        barrier()
        factor = gl.load(eight.k_scale + head * columns + entry)
        mbarrier.expect(ring.k_ready.index(stage), TILE * shape.D)
        at = [head // kv_heads, head % kv_heads, key, 0]
        load_block(eight.k_desc, at, ring.k_ready.index(stage), ring.k_eight.index(stage))  # [TILE, D]
        mbarrier.wait(ring.v_empty.index(stage), phase)
        mbarrier.expect(ring.v_ready.index(stage), TILE * shape.D)
        at = [head // kv_heads, head % kv_heads, 0, key]
        load_block(eight.v_desc, at, ring.v_ready.index(stage), ring.v_eight.index(stage))  # [D, TILE]
        stage, phase = advance(stage, phase, shape.STAGES)
    return stage, phase


@gluon.jit
def produce(ring, eight, work, sizes, mask, cache, skip, shape):
    """Steps of an item: its tiles from the last to the first, then its stripes, BLOCK_N at a time.

    Tiles come through the copy engine, as all keys do in FlashAttention-3 (Shah et al., 2024, Algorithm 1). Stripes are
    ours: wide ones come the same way (`send_columns`), of others each column is gathered (`gather_columns`), which takes
    four warps. Where steps may be left out (`skip`), tiles come in another order, and their values perhaps on demand:
    `fetch`.
    """
    k_boxes = boxes(ring.k_smem, shape.PAGE, shape)
    v_boxes = boxes(ring.v_smem, shape.PAGE, shape)
    k_columns = boxes(ring.k_smem, shape.BOX, shape)
    v_columns = boxes(ring.v_smem, shape.BOX, shape)
    parts: gl.constexpr = shape.TILE_K // shape.BLOCK_N
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    going = True
    while going:
        item, tiles, crossing, seen, unmasked, tile_list, stripe_list, first_eight, last_eight = take(
            work, mask, eight, slot, turn
        )
        if mask.tiles.indices is not None:
            tile_ptr = mask.tiles.indices + tile_list
        if mask.stripes.indices is not None:
            stripe_ptr = mask.stripes.indices + stripe_list
        slot, turn = advance(slot, turn, SLOTS)
        going = item < sizes.items
        if going:
            bh = item // sizes.blocks
            b = bh // sizes.heads
            hk = (bh % sizes.heads) // sizes.kv_group
            table = cache.table
            if shape.PAGE > 0:
                table = own(table, sizes, b, TABLE)
            if mask.tiles.indices is not None:
                if skip.below is not None:
                    start, _, _ = batch_row(sizes, b)
                    stage, phase = fetch(
                        ring, skip, cache, tile_ptr, tiles, crossing, b, hk, start, sizes.kv_len, k_boxes, v_boxes,
                        stage, phase, shape,
                    )  # fmt: skip
                else:
                    start, _, _ = batch_row(sizes, b)
                    kv_len = keys_of(sizes, b)
                    end = tiles
                    if eight.k_desc is not None:
                        end = first_eight
                    stage, phase = send_tiles(
                        ring, cache, tile_ptr, table, 0, end, tiles, crossing, b, hk, start, kv_len, k_boxes, v_boxes,
                        stage, phase, shape,
                    )  # fmt: skip
                    if eight.k_desc is not None:
                        stage, phase = send_tiles(
                            ring, cache, tile_ptr, table, last_eight, tiles, tiles, crossing, b, hk, start, kv_len,
                            k_boxes, v_boxes, stage, phase, shape,
                        )  # fmt: skip
                        if first_eight < last_eight:
                            stage, phase = send_eight(
                                ring, eight, bh // sizes.kv_group, sizes.heads // sizes.kv_group, mask.columns,
                                tile_ptr + (tiles - 1 - first_eight) // parts, (last_eight - first_eight) // parts,
                                stage, phase, shape,
                            )  # fmt: skip
            if mask.stripes.indices is not None:
                start, _, _ = batch_row(sizes, b)  # again, rather than held through the tiles
                bitmap_ptr = None
                if mask.bitmap is not None:
                    row = head_of(sizes, bh).to(gl.int64) * own_size(mask.tile_rows, sizes, b, TILE_ROWS)
                    row += query_block(item, sizes) // (shape.TILE_Q // shape.BLOCK_M)
                    bitmap_ptr = own(mask.bitmap, sizes, b, BITMAP) + row * own_size(mask.columns, sizes, b, COLUMNS)
                if shape.BOX > 0:
                    stage, phase = send_columns(
                        ring, cache, stripe_ptr, bitmap_ptr, table, seen, unmasked, b, hk, start, k_columns, v_columns,
                        stage, phase, shape,
                    )  # fmt: skip
                else:
                    stage, phase = gather_columns(
                        ring, cache, stripe_ptr, bitmap_ptr, table, seen, unmasked, b, hk, start, stage, phase, sizes, shape
                    )  # fmt: skip
