"""Work items: which query block comes next, what its lists say, and how the other partitions learn of it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseprefill.kernels.hopper.gluon import barrier, load_block

# Fields of a work item in shared memory.
ITEM = gl.constexpr(0)
TILES = gl.constexpr(1)
CROSSING = gl.constexpr(2)
SEEN = gl.constexpr(3)
WHOLE = gl.constexpr(4)
TILE_LIST = gl.constexpr(5)  # two words
STRIPE_LIST = gl.constexpr(7)  # two words
FIELDS = gl.constexpr(9)
SLOTS = gl.constexpr(2)


@gluon.jit
def floor_div(x, y: gl.constexpr):
    """Floor division that holds for negative x."""
    return gl.where(x >= 0, x // y, -((y - 1 - x) // y))


@gluon.jit
def item_rows(
    item, starts_ptr, lengths_ptr, q_offset, kv_len, blocks, heads,
    TILE_Q: gl.constexpr, BLOCK_M: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """Where an item lies: head of the batch, query block, the row's first key, its length, its first query's position,
    the query tile and the position of the block's first row. Blocks of one head follow each other, the longest first:
    programs that run together share keys in L2."""
    bh = item // blocks
    block = blocks - 1 - item % blocks
    start = 0
    if HAS_STARTS:
        start = gl.load(starts_ptr + bh // heads)
    length = kv_len - start
    if HAS_LENGTHS:
        length = gl.load(lengths_ptr + bh // heads)
    first = q_offset - start
    tile = floor_div(first, TILE_Q) + block // (TILE_Q // BLOCK_M)
    low = tile * TILE_Q + (block % (TILE_Q // BLOCK_M)) * BLOCK_M
    return bh, block, start, length, first, tile, low


@gluon.jit
def put(work_smem, slot, field: gl.constexpr, value):
    """Write one field of the item in `slot`."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    work_smem.index(slot * FIELDS + field).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def get(work_smem, slot, field: gl.constexpr):
    """Read one field of the item in `slot`."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(work_smem.index(slot * FIELDS + field).load(one), 0)


@gluon.jit
def put_wide(work_smem, slot, field: gl.constexpr, value):
    """Write an int64 in two words."""
    put(work_smem, slot, field, (value & 0xFFFFFFFF).to(gl.int32))
    put(work_smem, slot, field + 1, (value >> 32).to(gl.int32))


@gluon.jit
def get_wide(work_smem, slot, field: gl.constexpr):
    """Read an int64."""
    low, high = get(work_smem, slot, field), get(work_smem, slot, field + 1)
    return (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def count_up_to(list_ptr, count, bound):
    """How many entries of an ascending list are <= bound; one load where all are."""
    low = 0
    high = count
    if count > 0:
        if gl.load(list_ptr + count - 1) <= bound:
            low = count
        while low < high:
            middle = (low + high) // 2
            if gl.load(list_ptr + middle) <= bound:
                low = middle + 1
            else:
                high = middle
    return low


@gluon.jit
def schedule(
    q_smem, work_smem, q_ready, q_empty, work_ready, work_empty, q_desc, starts_ptr, lengths_ptr,
    tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr, stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr,
    next_ptr, q_offset, q_len, kv_len, blocks, tile_rows, group_rows, items, heads,
    TILE_Q: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, HAS_TILES: gl.constexpr, HAS_STRIPES: gl.constexpr, DEDUPE: gl.constexpr,
    HAS_STARTS: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """One warp: draw items from a counter, read what their lists hold, hand them on and load their queries.

    It runs ahead of the others, so that nobody waits for a chain of dependent loads between two items. Items without a
    key, as in the padding of short batch rows, need no queries.
    """
    half: gl.constexpr = BLOCK_M // 2
    parts: gl.constexpr = TILE_K // BLOCK_N
    turn = 0
    slot = 0
    phase = 1
    item = gl.atomic_add(next_ptr, 1, sem="relaxed")
    while item < items:
        bh, block, _, length, first, tile, low = item_rows(
            item, starts_ptr, lengths_ptr, q_offset, kv_len, blocks, heads, TILE_Q, BLOCK_M, HAS_STARTS, HAS_LENGTHS
        )
        last = gl.minimum(gl.minimum(low + BLOCK_M, first + q_len), length) - 1
        live = (low + BLOCK_M > 0) & (low + BLOCK_M > first) & (last >= low)
        tiles = 0
        crossing = 0
        tile_list = gl.full([], 0, gl.int64)
        if HAS_TILES:
            row = bh.to(gl.int64) * tile_rows + block // (TILE_Q // BLOCK_M)
            count = gl.where(live, gl.load(tile_counts_ptr + row), 0)
            tile_list = gl.load(tile_offsets_ptr + row)
            list_ptr = tile_indices_ptr + tile_list
            tiles = count * parts
            # Lists ascend: how many of the last steps hold a key beyond row `low`, so that they need a mask.
            more = count > 0
            while more:
                entry = gl.load(list_ptr + count - 1 - crossing // parts)
                below = gl.minimum(gl.maximum((low + 1 - entry * TILE_K) // BLOCK_N, 0), parts)
                crossing += parts - below
                more = (below == 0) & (crossing < tiles)
        seen = 0
        whole = 0
        stripe_list = gl.full([], 0, gl.int64)
        if HAS_STRIPES:
            row = bh.to(gl.int64) * group_rows + floor_div(tile, GROUP) - floor_div(first, TILE_Q * GROUP)
            stripe_list = gl.load(stripe_offsets_ptr + row, mask=live, other=0)
            count = gl.load(stripe_counts_ptr + row, mask=live, other=0)
            seen = count_up_to(stripe_indices_ptr + stripe_list, count, last)
            if not DEDUPE:
                whole = count_up_to(stripe_indices_ptr + stripe_list, seen, low) // BLOCK_N
        mbarrier.wait(work_empty.index(slot), phase)
        put(work_smem, slot, ITEM, item)
        put(work_smem, slot, TILES, tiles)
        put(work_smem, slot, CROSSING, crossing)
        put(work_smem, slot, SEEN, seen)
        put(work_smem, slot, WHOLE, whole)
        if HAS_TILES:
            put_wide(work_smem, slot, TILE_LIST, tile_list)
        if HAS_STRIPES:
            put_wide(work_smem, slot, STRIPE_LIST, stripe_list)
        barrier()
        mbarrier.arrive(work_ready.index(slot), count=1)
        if tiles + seen > 0:
            mbarrier.wait(q_empty, (turn & 1) ^ 1)
            mbarrier.expect(q_ready, BLOCK_M * D * 2)
            load_block(q_desc, [bh // heads, bh % heads, low - first, 0], q_ready, q_smem.index(0))
            load_block(q_desc, [bh // heads, bh % heads, low - first + half, 0], q_ready, q_smem.index(1))
            turn += 1
        slot += 1
        if slot == SLOTS:
            slot = 0
            phase ^= 1
        item = gl.atomic_add(next_ptr, 1, sem="relaxed")
    mbarrier.wait(work_empty.index(slot), phase)
    put(work_smem, slot, ITEM, items)
    barrier()
    mbarrier.arrive(work_ready.index(slot), count=1)
