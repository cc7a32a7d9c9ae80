"""The producer over an fp8 cache: numbers are converted on their way from the pages to shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparseprefill.kernels.roles.gluon import barrier, load_rows, reinterpret
from sparseprefill.kernels.roles.paging import row_in_cache
from sparseprefill.kernels.roles.produce import HIDDEN
from sparseprefill.kernels.roles.ring import advance
from sparseprefill.kernels.roles.work import SLOTS, column_keys, query_block, take


@gluon.constexpr_function
def words_layout(BLOCK_N, WORDS):
    """A step's keys over four warps: four words of a row a lane, so that one load fetches them.

    Eight lanes that follow each other hold eight rows, whose places in shared memory lie in different banks.
    """
    registers = [[0, 1], [0, 2]]
    registers += [[0, word] for word in (16, 32) if word < WORDS]
    registers += [[row, 0] for row in (32, 64) if row < BLOCK_N]
    lanes = [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [BLOCK_N, WORDS])


@gluon.constexpr_function
def widening(FP8, HALF):
    """PTX from four bytes to four halves, exact, NaN and infinities included. To bfloat16 the way is by float32, since
    no instruction leads there from fp8."""
    lines = [f"cvt.rn.f16x2.{FP8}x2 a, low;", f"cvt.rn.f16x2.{FP8}x2 b, high;"]
    if HALF == "fp16":
        lines += ["mov.b32 $0, a;", "mov.b32 $1, b;"]
    else:
        lines += ["mov.b32 {x0, x1}, a;", "mov.b32 {x2, x3}, b;"]
        lines += [f"cvt.f32.f16 y{i}, x{i};" for i in range(4)]
        lines += ["cvt.rn.bf16x2.f32 $0, y1, y0;", "cvt.rn.bf16x2.f32 $1, y3, y2;"]
    made = [".reg .b16 low, high;", ".reg .b32 a, b;", ".reg .b16 x<4>;", ".reg .f32 y<4>;", "mov.b32 {low, high}, $2;"]
    return "{\n" + "\n".join(made + lines) + "\n}"


@gluon.jit
def hand_over(raw, smem, ready, shape):
    """Fill a stage with what words of the cache, ``[BLOCK_N, D / 4]``, stand for, before its scale, and tell the
    consumers."""
    WORDS: gl.constexpr = shape.D // 4
    asm: gl.constexpr = widening(shape.FP8, smem.dtype.name)
    block: gl.constexpr = words_layout(shape.BLOCK_N, WORDS)
    pairs: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    x = raw.load(block)  # [BLOCK_N, WORDS]
    first, last = gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    stage = reinterpret(smem, gl.int32, [shape.BLOCK_N, 2 * WORDS], pairs)
    stage.store(gl.join(first, last).reshape([shape.BLOCK_N, 2 * WORDS]))
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def keys_at(j, tiles, seen, tile_ptr, stripe_ptr, number, shape):
    """Keys of step j, [BLOCK_N]; of steps behind the last one, some that there are. Pointers may be None."""
    at = number * 0
    if tile_ptr is not None:
        parts: gl.constexpr = shape.TILE_K // shape.BLOCK_N
        left = gl.maximum(tiles - 1 - j, 0)
        entry = gl.load(tile_ptr + left // parts, mask=tiles > 0, other=0)
        at += entry * shape.TILE_K + (left % parts) * shape.BLOCK_N + number
    if stripe_ptr is not None:
        place = gl.maximum(gl.minimum((j - tiles) * shape.BLOCK_N + number, seen - 1), 0)
        column = column_keys(stripe_ptr, place, shape.WIDTH, some=number * 0 < seen)
        at = gl.where(number * 0 + j >= tiles, column, at)
    return at


@gluon.jit
def rows_at(at, table_ptr, kv_len, cache, shape):
    """First words of the rows of keys `at`, in words from the first row of their head, int64 ``[BLOCK_N]``; of keys behind
    the request's last, where the first one's does."""
    row = row_in_cache(table_ptr, gl.where(at < kv_len, at, 0), cache.stride_kb, shape.PAGE).to(gl.uint32, bitcast=True)
    return (row.to(gl.uint64) * cache.stride_kn.to(gl.uint32, bitcast=True).to(gl.uint64)).to(gl.int64)


@gluon.jit
def fetch(raw, base, where, words, here):
    """Start copying rows into a slot, 16 bytes a lane, if they are those of a step that is to come."""
    if here:
        load_rows(raw, base + (where[:, None] + words[None, :]))  # [BLOCK_N, WORDS]
    async_copy.commit_group()


@gluon.jit
def produce_converted(ring, raw, eight, work, sizes, mask, cache, shape):
    """Four warps, and steps as `produce` has them; of one request, whose steps are never left out.

    Ours. What the copy engine fetches could not be converted on its way, so tiles are gathered by rows as stripes are,
    into slots of `raw`, AHEAD steps ahead of their conversion. A thread converts what it has fetched itself.
    """
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    WORDS: gl.constexpr = shape.D // 4
    AHEAD: gl.constexpr = shape.AHEAD
    block: gl.constexpr = words_layout(BLOCK_N, WORDS)
    number = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, block))
    words = gl.arange(0, WORDS, layout=gl.SliceLayout(0, block))
    tile_ptr = mask.tiles.indices
    stripe_ptr = mask.stripes.indices
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    going = True
    while going:
        item, tiles, _, seen, unmasked, tile_list, stripe_list, _, _ = take(work, mask, eight, slot, turn)
        slot, turn = advance(slot, turn, SLOTS)
        going = item < sizes.items
        if going:
            bh = item // sizes.blocks
            hk = (bh % sizes.heads) // sizes.kv_group
            if mask.tiles.indices is not None:
                tile_ptr = mask.tiles.indices + tile_list
            if mask.stripes.indices is not None:
                stripe_ptr = mask.stripes.indices + stripe_list
            k_base = cache.k + hk.to(gl.int64) * cache.stride_kh
            v_base = cache.v + hk.to(gl.int64) * cache.stride_vh
            steps = tiles + gl.cdiv(seen, BLOCK_N)
            where = number.to(gl.int64)
            for j in gl.static_range(AHEAD):  # keys of step AHEAD - 1 come last, and its values in the loop
                at = keys_at(j, tiles, seen, tile_ptr, stripe_ptr, number, shape)
                where = rows_at(at, cache.table, sizes.kv_len, cache, shape)
                fetch(raw.k.index(j), k_base, where, words, j < steps)
                if j + 1 < AHEAD:
                    fetch(raw.v.index(j), v_base, where, words, j < steps)
            following = keys_at(AHEAD, tiles, seen, tile_ptr, stripe_ptr, number, shape)
            for j in range(steps):
                fetch(raw.v.index((j + AHEAD - 1) % AHEAD), v_base, where, words, j + AHEAD - 1 < steps)
                where = rows_at(following, cache.table, sizes.kv_len, cache, shape)
                following = keys_at(j + AHEAD + 1, tiles, seen, tile_ptr, stripe_ptr, number, shape)
                at = keys_at(j, tiles, seen, tile_ptr, stripe_ptr, number, shape)
                if mask.stripes.indices is not None:  # noqa: SIM102 - the first is known when this is compiled
                    if j >= tiles + unmasked:
                        keep = (j - tiles) * BLOCK_N + number < seen
                        if mask.bitmap is not None:
                            tile = query_block(item, sizes) // (shape.TILE_Q // shape.BLOCK_M)
                            row = bh.to(gl.int64) * mask.tile_rows + tile
                            keep = keep & (gl.load(mask.bitmap + row * mask.columns + at // shape.TILE_K) == 0)
                        at = gl.where(keep, at, at | HIDDEN)
                mbarrier.wait(ring.k_empty.index(stage), phase)
                ring.positions.index(stage).store(at)
                async_copy.wait_group(2 * AHEAD - 1)
                hand_over(raw.k.index(j % AHEAD), ring.k_smem.index(stage), ring.k_ready.index(stage), shape)
                fetch(raw.k.index(j % AHEAD), k_base, where, words, j + AHEAD < steps)
                mbarrier.wait(ring.v_empty.index(stage), phase)
                async_copy.wait_group(2 * AHEAD - 1)
                hand_over(raw.v.index(j % AHEAD), ring.v_smem.index(stage), ring.v_ready.index(stage), shape)
                stage, phase = advance(stage, phase, shape.STAGES)
