"""Work items: which query block comes next, what its lists say, and how the other partitions learn of it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseprefill.kernels.attention.arguments import GROUP_ROWS, Q_BEGIN, STRIPE_LISTS, TILE_LISTS, TILE_ROWS
from sparseprefill.kernels.lists.order import SHIFT
from sparseprefill.kernels.roles.gluon import barrier, load_block
from sparseprefill.kernels.roles.paging import batch_row, behind, head_of, own, own_size, rows_of
from sparseprefill.kernels.roles.ring import advance

# Fields of a work item in shared memory: 32-bit words.
ITEM = gl.constexpr(0)  # its number; `sizes.items` where none is left
TILES = gl.constexpr(1)  # steps of tiles, from the last key to the first
CROSSING = gl.constexpr(2)  # the first of them, which need a mask
SEEN = gl.constexpr(3)  # keys of stripes
UNMASKED = gl.constexpr(4)  # steps of stripes before the first that needs a mask
TILE_LIST = gl.constexpr(5)  # where the list of tiles begins; two words
STRIPE_LIST = gl.constexpr(7)  # and that of stripes; two words
FIRST_EIGHT = gl.constexpr(9)  # the first step of tiles in 8 bits, where there are any (`eight`)
LAST_EIGHT = gl.constexpr(10)  # one past the last
NUMBER = gl.constexpr(11)  # of its piece, where items are cut (`pieces`)
PIECES = gl.constexpr(12)  # how many the item has
FIRST = gl.constexpr(13)  # the number of its first piece's draw
FIELDS = gl.constexpr(14)
SLOTS = gl.constexpr(2)


@gluon.jit
def floor_div(x, y: gl.constexpr):
    """Floor division that holds for negative x."""
    return gl.where(x >= 0, x // y, -((y - 1 - x) // y))


@gluon.jit
def query_block(item, sizes):
    """Blocks of one head follow each other, the longest first: programs that run together share keys in L2."""
    return sizes.blocks - 1 - item % sizes.blocks


@gluon.jit
def item_rows(item, sizes, shape):
    """Place of an item: head of the batch, query block, the row's length, the position of its first query, the query
    tile and the position of the block's first row."""
    per_tile: gl.constexpr = shape.TILE_Q // shape.BLOCK_M
    bh = item // sizes.blocks
    block = query_block(item, sizes)
    _, length, first = batch_row(sizes, bh // sizes.heads)
    tile = floor_div(first, shape.TILE_Q) + block // per_tile
    low = tile * shape.TILE_Q + (block % per_tile) * shape.BLOCK_M
    return bh, block, length, first, tile, low


@gluon.jit
def put(work, slot, field: gl.constexpr, value):
    """Write one field of the item in `slot`."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    work.smem.index(slot * FIELDS + field).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def get(work, slot, field: gl.constexpr):
    """Read one field of the item in `slot`."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(work.smem.index(slot * FIELDS + field).load(one), 0)


@gluon.jit
def put_wide(work, slot, field: gl.constexpr, value):
    """Write an int64 in two words."""
    put(work, slot, field, (value & 0xFFFFFFFF).to(gl.int32))
    put(work, slot, field + 1, (value >> 32).to(gl.int32))


@gluon.jit
def get_wide(work, slot, field: gl.constexpr):
    """Read an int64."""
    low, high = get(work, slot, field), get(work, slot, field + 1)
    return (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def take(work, mask, eight, slot, turn):
    """Wait for the item in `slot`, read it and free the slot: ITEM to UNMASKED in their order, and where the item's
    lists begin, 0 where the mask has none; then FIRST_EIGHT and LAST_EIGHT, 0 where nothing is done in 8 bits."""
    mbarrier.wait(work.ready.index(slot), turn)
    item = get(work, slot, ITEM)
    tiles = get(work, slot, TILES)
    crossing = get(work, slot, CROSSING)
    seen = get(work, slot, SEEN)
    unmasked = get(work, slot, UNMASKED)
    tile_list = (item * 0).to(gl.int64)
    stripe_list = (item * 0).to(gl.int64)
    if mask.tiles.indices is not None:
        tile_list = get_wide(work, slot, TILE_LIST)
    if mask.stripes.indices is not None:
        stripe_list = get_wide(work, slot, STRIPE_LIST)
    first_eight = 0
    last_eight = 0
    if eight.k_desc is not None:
        first_eight = get(work, slot, FIRST_EIGHT)
        last_eight = get(work, slot, LAST_EIGHT)
    mbarrier.arrive(work.empty.index(slot), count=1)
    return item, tiles, crossing, seen, unmasked, tile_list, stripe_list, first_eight, last_eight


@gluon.jit
def count_up_to(list_ptr, count, bound, WIDTH: gl.constexpr):
    """Number of keys <= bound in an ascending list of columns, each WIDTH keys wide; one load where all are."""
    end = bound
    if WIDTH > 1:
        bound = floor_div(end, WIDTH)
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
    if WIDTH > 1:  # noqa: SIM102 - the first is known when this is compiled
        if low > 0:
            behind = (gl.load(list_ptr + low - 1) + 1) * WIDTH
            low = low * WIDTH - gl.maximum(behind - 1 - end, 0)
    return low


@gluon.jit
def column_keys(list_ptr, number, WIDTH: gl.constexpr, some=None):
    """Positions of keys by their number in a list of columns, each WIDTH keys wide; 0 where not `some`, None for all."""
    if WIDTH == 1:
        if some is None:
            at = gl.load(list_ptr + number)
        else:
            at = gl.load(list_ptr + number, mask=some, other=0)
    else:
        if some is None:
            at = gl.load(list_ptr + number // WIDTH) * WIDTH + number % WIDTH
        else:
            at = gl.load(list_ptr + number // WIDTH, mask=some, other=0) * WIDTH + number % WIDTH
    return at


@gluon.jit
def cut(at, steps, tiles, seen, shape):
    """Steps of tiles and keys of stripes before step `at` of an item, whole tiles and whole columns."""
    parts: gl.constexpr = shape.TILE_K // shape.BLOCK_N
    columns: gl.constexpr = max(shape.BLOCK_N, shape.WIDTH)  # both are powers of two
    of_tiles = gl.where(at < tiles, at // parts * parts, tiles)
    of_stripes = gl.maximum(at - tiles, 0) * shape.BLOCK_N // columns * columns
    return of_tiles, gl.where(at < steps, gl.minimum(of_stripes, seen), seen)


@gluon.jit
def schedule(queries, eight, work, sizes, mask, shape):
    """One warp: draw items from a counter, read what their lists hold, hand them on and load their queries.

    Ours. It runs ahead of the others, so that nobody waits for a chain of dependent loads between two items. Items
    without a key, as in the padding of short batch rows, need no queries.
    """
    half: gl.constexpr = shape.BLOCK_M // 2
    parts: gl.constexpr = shape.TILE_K // shape.BLOCK_N  # steps of a tile
    per_tile: gl.constexpr = shape.TILE_Q // shape.BLOCK_M  # query blocks of a tile
    per_list: gl.constexpr = shape.TILE_Q * shape.GROUP  # query rows of a list of stripes
    turn = 0
    slot = 0
    phase = 1
    drawn = gl.atomic_add(work.counter, 1, sem="relaxed")
    draws = sizes.items
    if work.draws is not None:
        draws = work.draws
    if work.pieces is not None:
        draws = gl.load(work.pieces)
    while drawn < draws:
        item = drawn
        if work.order is not None:
            item = gl.load(work.order + drawn)
        if work.pieces is not None:
            item = gl.load(work.pieces + 1 + 2 * drawn)
            piece = gl.load(work.pieces + 2 + 2 * drawn)
        bh, block, length, first, tile, low = item_rows(item, sizes, shape)
        of = bh // sizes.heads
        head = head_of(sizes, bh)
        last = gl.minimum(gl.minimum(low + shape.BLOCK_M, first + rows_of(sizes, of)), length) - 1
        live = (low + shape.BLOCK_M > 0) & (low + shape.BLOCK_M > first) & (last >= low)
        tiles = 0
        crossing = 0
        if mask.tiles.indices is not None:
            row = head.to(gl.int64) * own_size(mask.tile_rows, sizes, of, TILE_ROWS) + block // per_tile
            count = gl.where(live, gl.load(own(mask.tiles.counts, sizes, of, TILE_LISTS) + row), 0)
            tile_list = gl.load(own(mask.tiles.offsets, sizes, of, TILE_LISTS + 1) + row)
            tile_list = own(tile_list, sizes, of, TILE_LISTS + 2)
            list_ptr = mask.tiles.indices + tile_list
            tiles = count * parts
            # Lists ascend: how many of the last steps hold a key beyond row `low`, so that they need a mask.
            more = count > 0
            while more:
                entry = gl.load(list_ptr + count - 1 - crossing // parts)
                below = gl.minimum(gl.maximum((low + 1 - entry * shape.TILE_K) // shape.BLOCK_N, 0), parts)
                crossing += parts - below
                more = (below == 0) & (crossing < tiles)
        seen = 0
        unmasked = 0
        if mask.stripes.indices is not None:
            group_rows = own_size(mask.group_rows, sizes, of, GROUP_ROWS)
            row = head.to(gl.int64) * group_rows + floor_div(tile, shape.GROUP) - floor_div(first, per_list)
            stripe_list = gl.load(own(mask.stripes.offsets, sizes, of, STRIPE_LISTS + 1) + row, mask=live, other=0)
            stripe_list = own(stripe_list, sizes, of, STRIPE_LISTS + 2)
            count = gl.load(own(mask.stripes.counts, sizes, of, STRIPE_LISTS) + row, mask=live, other=0)
            list_ptr = mask.stripes.indices + stripe_list
            seen = count_up_to(list_ptr, count, last, shape.WIDTH)
            if mask.bitmap is None:
                entries = seen
                if shape.WIDTH > 1:
                    entries = gl.cdiv(seen, shape.WIDTH)
                unmasked = count_up_to(list_ptr, entries, low, shape.WIDTH) // shape.BLOCK_N
        number = 0
        pieces = 1
        if work.pieces is not None:
            number = piece & ((1 << SHIFT) - 1)
            pieces = piece >> SHIFT
            steps = tiles + gl.cdiv(seen, shape.BLOCK_N)
            tiles_before, seen_before = cut(steps * number // pieces, steps, tiles, seen, shape)
            tiles_behind, seen_behind = cut(steps * (number + 1) // pieces, steps, tiles, seen, shape)
            if mask.tiles.indices is not None:  # from the last one down
                tile_list += (tiles - tiles_behind) // parts
            if mask.stripes.indices is not None:
                stripe_list += seen_before // shape.WIDTH
            tiles = tiles_behind - tiles_before
            seen = seen_behind - seen_before
            crossing = gl.minimum(gl.maximum(crossing - tiles_before, 0), tiles)
            unmasked = gl.maximum(unmasked - seen_before // shape.BLOCK_N, 0)
        mbarrier.wait(work.empty.index(slot), phase)
        put(work, slot, ITEM, item)
        if work.pieces is not None:
            put(work, slot, NUMBER, number)
            put(work, slot, PIECES, pieces)
            put(work, slot, FIRST, drawn - number)
        put(work, slot, TILES, tiles)
        put(work, slot, CROSSING, crossing)
        put(work, slot, SEEN, seen)
        put(work, slot, UNMASKED, unmasked)
        if eight.k_desc is not None:
            # In 16 bits: tiles with a key behind a row, the first key tile, the last query block, and heads said to.
            first_eight = gl.minimum(gl.cdiv(crossing, parts) * parts, tiles)
            last_eight = tiles
            if tiles > 0:
                if gl.load(list_ptr) == 0:
                    last_eight = tiles - parts
                if (gl.load(eight.exact + bh) != 0) | (block == sizes.blocks - 1):
                    last_eight = 0
            first_eight = gl.where(first_eight < last_eight, first_eight, tiles)
            put(work, slot, FIRST_EIGHT, first_eight)
            put(work, slot, LAST_EIGHT, gl.maximum(first_eight, last_eight))
        if mask.tiles.indices is not None:
            put_wide(work, slot, TILE_LIST, tile_list)
        if mask.stripes.indices is not None:
            put_wide(work, slot, STRIPE_LIST, stripe_list)
        barrier()
        mbarrier.arrive(work.ready.index(slot), count=1)
        if tiles + seen > 0:
            mbarrier.wait(queries.empty, (turn & 1) ^ 1)
            mbarrier.expect(queries.ready, shape.BLOCK_M * shape.D * 2)
            b, h, index = bh // sizes.heads, bh % sizes.heads, low - first
            if sizes.requests is not None:
                b = b * 0  # all rows lie in one
                index += behind(sizes, of, Q_BEGIN).to(gl.int32)
            load_block(queries.desc, [b, h, index, 0], queries.ready, queries.smem.index(0))  # [half, D]
            load_block(queries.desc, [b, h, index + half, 0], queries.ready, queries.smem.index(1))  # [half, D]
            turn += 1
        slot, phase = advance(slot, phase, SLOTS)
        drawn = gl.atomic_add(work.counter, 1, sem="relaxed")
    mbarrier.wait(work.empty.index(slot), phase)
    put(work, slot, ITEM, sizes.items)
    barrier()
    mbarrier.arrive(work.ready.index(slot), count=1)
