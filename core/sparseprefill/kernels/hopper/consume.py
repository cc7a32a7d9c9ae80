"""The consumers: online softmax over the steps of an item, 64 query rows a warpgroup."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparseprefill.kernels.attention.arguments import OUT_BEGIN
from sparseprefill.kernels.hopper.eight import attend_eight, round_queries
from sparseprefill.kernels.hopper.mma import start_logits
from sparseprefill.kernels.hopper.skim import bound_of, skim
from sparseprefill.kernels.roles.gluon import barrier
from sparseprefill.kernels.roles.paging import behind, rows_of
from sparseprefill.kernels.roles.ring import advance, hide, pin, softmax, values_of
from sparseprefill.kernels.roles.work import (
    CROSSING,
    FIRST,
    FIRST_EIGHT,
    ITEM,
    LAST_EIGHT,
    NUMBER,
    PIECES,
    SEEN,
    SLOTS,
    TILES,
    UNMASKED,
    get,
    item_rows,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def quad_layout(width, step):
    """Layouts of ``[64, width]`` from what the matrix instruction leaves (0) to 8 values a lane side by side (2).

    Rows stay where they are, and each step exchanges one bit between the four lanes of a quad and their registers, which
    the compiler does by shuffles.
    """
    lanes = [[[0, 2], [0, 4]], [[0, 8], [0, 4]], [[0, 8], [0, 16]]][step]
    columns = [[0, c] for c in (1, 2, 4, 8, 16, 32, 64, 128) if c < width and [0, c] not in lanes]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, [8, 0]],
        lane_bases=[*lanes, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def store_rows(ptr, stride, first, q_len, x, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Rows x [ROWS, WIDTH], 16-bit, to row `first` and on of the head at `ptr`, those within [0, q_len): 16 bytes a
    lane, without shared memory."""
    layout: gl.constexpr = quad_layout(WIDTH, 2)
    x = gl.convert_layout(gl.convert_layout(x, quad_layout(WIDTH, 1)), layout)
    index = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    inside = (index >= 0) & (index < q_len)
    gl.store(ptr + index.to(gl.int64)[:, None] * stride + dims[None, :], x, mask=inside[:, None])


@gluon.jit
def attend_sixteen(
    q, queries, ring, begin, end, crossing, masked, position, m, l, o, o_high, stage, phase, scale,
    RESUMED: gl.constexpr, LAST: gl.constexpr, shape,
):  # fmt: skip
    """Steps `begin` up to `end` of an item, at least one, in 16 bits: m, l ``[half]`` and o, o_high ``[half, width]``
    with them, the slot behind them and its phase.

    RESUMED: whether o holds anything yet. LAST: whether the queries are free behind them. o_high: of a head dimension
    beyond 128; else it is passed on.
    """
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    half: gl.constexpr = shape.BLOCK_M // 2
    width: gl.constexpr = shape.D if shape.D <= 128 else 128
    wide: gl.constexpr = shape.D > 128
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    s_columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = ring.k_smem.dtype
    zero = gl.full([half, BLOCK_N], 0.0, gl.float32, s_layout)
    mbarrier.wait(ring.k_ready.index(stage), phase)
    s = start_logits(q, ring, stage, zero, shape)  # [half, BLOCK_N]
    s = warpgroup_mma_wait(0, deps=[s])
    if (begin < crossing) | (begin >= masked):
        s = hide(s, ring.positions.index(stage), position, s_columns)
    mbarrier.arrive(ring.k_empty.index(stage), count=1)
    p, alpha, l, m = softmax(s, m, l, scale)
    if RESUMED:
        factor = gl.convert_layout(alpha, o_rows)[:, None]
        o = o * factor
        if wide:
            o_high = o_high * factor
    p16 = gl.convert_layout(p.to(dtype), p_layout)  # [half, BLOCK_N]
    for j in range(begin + 1, end):
        before = stage
        phase_before = phase
        stage, phase = advance(stage, phase, shape.STAGES)
        mbarrier.wait(ring.k_ready.index(stage), phase)
        s = start_logits(q, ring, stage, zero, shape)  # [half, BLOCK_N]
        mbarrier.wait(ring.v_ready.index(before), phase_before)
        v = values_of(ring, before, shape)  # [BLOCK_N, D]
        if wide:
            o = warpgroup_mma(p16, v.slice(0, width, dim=1), o, is_async=True)  # [half, width]
            o_high = warpgroup_mma(p16, v.slice(width, width, dim=1), o_high, is_async=True)
        else:
            o = warpgroup_mma(p16, v, o, is_async=True)  # [half, width]
        s = warpgroup_mma_wait(2 if wide else 1, deps=[s])
        if (j < crossing) | (j >= masked):
            s = hide(s, ring.positions.index(stage), position, s_columns)
        mbarrier.arrive(ring.k_empty.index(stage), count=1)
        p, alpha, l, m = softmax(s, m, l, scale)
        # ptxas moves the wait for the values above the softmax, which would then hide behind nothing.
        # A wait that is over already (a loop in the machine code) holds it in place.
        l = pin(l)  # noqa: E741
        mbarrier.wait(ring.k_ready.index(stage), phase)
        if wide:
            o, o_high = warpgroup_mma_wait(0, deps=[o, o_high])
        else:
            o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(ring.v_empty.index(before), count=1)
        factor = gl.convert_layout(alpha, o_rows)[:, None]
        o = o * factor
        if wide:
            o_high = o_high * factor
        p16 = gl.convert_layout(p.to(dtype), p_layout)  # [half, BLOCK_N]
    if LAST:
        mbarrier.arrive(queries.empty, count=1)
    mbarrier.wait(ring.v_ready.index(stage), phase)
    v = values_of(ring, stage, shape)  # [BLOCK_N, D]
    if wide:
        o = warpgroup_mma(p16, v.slice(0, width, dim=1), o, is_async=True)  # [half, width]
        o_high = warpgroup_mma(p16, v.slice(width, width, dim=1), o_high, is_async=True)
        o, o_high = warpgroup_mma_wait(0, deps=[o, o_high])
    else:
        o = warpgroup_mma(p16, v, o, is_async=True)  # [half, width]
        o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(ring.v_empty.index(stage), count=1)
    stage, phase = advance(stage, phase, shape.STAGES)
    return m, l, o, o_high, stage, phase


@gluon.jit
def attend_mixed(
    NUMBER: gl.constexpr, q, queries, ring, eight, tiles, crossing, first, last, position, bh, m, l, o, stage, phase,
    scale, RESUMED: gl.constexpr, sizes, shape,
):  # fmt: skip
    """`attend_sixteen`, of tiles alone: the steps before `first` and from `last` on, then those between in 8 bits, two at once."""
    if (first > 0) | (last < tiles):
        end = first + tiles - last
        m, l, o, _, stage, phase = attend_sixteen(
            q, queries, ring, 0, end, crossing, tiles, position, m, l, o, o, stage, phase, scale, RESUMED, False, shape
        )
    if first < last:
        half: gl.constexpr = shape.BLOCK_M // 2
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.D, 32])
        head = bh // sizes.kv_group
        q8 = queries.eight.index(NUMBER)
        by_row, beside = round_queries(q, q8, eight.k_mean + head * shape.D, scale, layout, half, shape.D)
        mbarrier.arrive(queries.empty, count=1)
        m, l, o, stage, phase = attend_eight(
            q8, by_row, beside, ring, eight, head, (last - first) // 2, m, l, o, stage, phase, shape
        )
    else:
        mbarrier.arrive(queries.empty, count=1)
    return m, l, o, stage, phase


@gluon.jit
def join(HALF: gl.constexpr, parts, place, number, pieces, m, l, o, o_high, shape):
    """State of an item whose piece this is, and whether all of its pieces are in it; else what it was.

    Each piece leaves its own, and whoever comes last takes them all in their order, so that a run is like another.
    place: the item's first draw.
    """
    half: gl.constexpr = shape.BLOCK_M // 2
    width: gl.constexpr = shape.D if shape.D <= 128 else 128
    wide: gl.constexpr = shape.D > 128
    s_rows: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.BLOCK_N, 16]))
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    row = HALF * half + gl.arange(0, half, layout=s_rows)
    o_row = HALF * half + gl.arange(0, half, layout=o_rows)
    dims = gl.arange(0, width, layout=gl.SliceLayout(0, o_layout))
    level = parts.level + row  # [half]
    acc = parts.acc + o_row[:, None] * shape.D + dims[None, :]  # [half, width]
    mine = place + number
    gl.store(level + mine * 2 * shape.BLOCK_M, m)
    gl.store(level + (mine * 2 + 1) * shape.BLOCK_M, l)
    gl.store(acc + mine * shape.BLOCK_M * shape.D, o)
    if wide:
        gl.store(acc + mine * shape.BLOCK_M * shape.D + width, o_high)
    barrier()  # all of it is written before it counts
    last = gl.atomic_add(parts.arrived + 2 * place + HALF, 1, sem="acq_rel") == pieces - 1
    if last:
        m = gl.full([half], float("-inf"), gl.float32, s_rows)
        l = gl.full([half], 0.0, gl.float32, s_rows)  # noqa: E741
        o = gl.full([half, width], 0.0, gl.float32, o_layout)
        if wide:
            o_high = gl.full([half, width], 0.0, gl.float32, o_layout)
        for at in range(place, place + pieces):
            more = gl.load(level + at * 2 * shape.BLOCK_M)  # [half]
            top = gl.maximum(m, more)
            base = gl.where(top == float("-inf"), 0.0, top)
            before = gl.exp2(m - base)
            factor = gl.exp2(more - base)
            l = l * before + gl.load(level + (at * 2 + 1) * shape.BLOCK_M) * factor  # noqa: E741
            before = gl.convert_layout(before, o_rows)[:, None]
            factor = gl.convert_layout(factor, o_rows)[:, None]
            o = o * before + gl.load(acc + at * shape.BLOCK_M * shape.D) * factor
            if wide:
                o_high = o_high * before + gl.load(acc + at * shape.BLOCK_M * shape.D + width) * factor
            m = top
    return m, l, o, o_high, last


@gluon.jit
def leave(HALF: gl.constexpr, bh, block, length, first, low, m, l, o, o_high, sizes, outputs, shape):
    """Write what a consumer's half of a query block came to: out and LSE, or the state; and the flag of nonfinite sums."""
    D: gl.constexpr = shape.D
    half: gl.constexpr = shape.BLOCK_M // 2
    width: gl.constexpr = D if D <= 128 else 128
    wide: gl.constexpr = D > 128
    s_rows: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.BLOCK_N, 16]))
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    q_len = rows_of(sizes, bh // sizes.heads)
    row = low - first + HALF * half  # of the call's queries
    index = row + gl.arange(0, half, layout=s_rows)
    position = index + first
    inside = (index >= 0) & (index < q_len)
    o_index = row + gl.arange(0, half, layout=o_rows)
    o_inside = (o_index >= 0) & (o_index < q_len)
    dims = gl.arange(0, width, layout=gl.SliceLayout(0, o_layout))
    head_row = bh.to(gl.int64) * q_len
    real = inside & (position >= 0) & (position < length)
    o_real = o_inside & (o_index + first >= 0) & (o_index + first < length)
    if outputs.v_scale is not None:
        o = o * outputs.v_scale
        if wide:
            o_high = o_high * outputs.v_scale
    # A NaN, or an infinity, shows in a row's sum: one flag for the block, whoever writes it.
    checked = gl.sum(o, 1)
    if wide:
        checked += gl.sum(o_high, 1)
    flag = gl.full([half], 1, gl.int8, o_rows)
    where = outputs.nonfinite + bh.to(gl.int64) * sizes.blocks + block + 0 * o_index
    gl.store(where, flag, mask=o_real & (checked - checked != 0.0))
    m = gl.where(real, m, float("-inf"))
    l = gl.where(real, l, 0.0)  # noqa: E741
    if outputs.state.m is not None:
        gl.store(outputs.state.m + head_row + index, m * LN2, mask=inside)
        gl.store(outputs.state.l + head_row + index, l, mask=inside)
        at = outputs.state.acc + (head_row + o_index)[:, None] * D + dims[None, :]
        gl.store(at, gl.where(o_real[:, None], o, 0.0), mask=o_inside[:, None])
        if wide:
            gl.store(at + width, gl.where(o_real[:, None], o_high, 0.0), mask=o_inside[:, None])
    else:
        lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(gl.where(l == 0.0, 1.0, l))) * LN2)
        b = (bh // sizes.heads).to(gl.int64)
        h = (bh % sizes.heads).to(gl.int64)
        lse_ptr = outputs.lse + b * outputs.stride_lb + h * outputs.stride_lh
        if sizes.requests is not None:
            begin = behind(sizes, bh // sizes.heads, OUT_BEGIN)
            lse_ptr += begin
        gl.store(lse_ptr + index, lse, mask=inside)
        total = l
        if outputs.sinks is not None:
            floor = gl.where(m == float("-inf"), 0.0, m)
            total += gl.exp2(gl.load(outputs.sinks + bh % sizes.heads).to(gl.float32) * LOG2E - floor)
        inverse = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), o_rows)
        out = gl.where(o_real[:, None], o * inverse[:, None], 0.0).to(outputs.out.dtype.element_ty)
        base_ptr = outputs.out + b * outputs.stride_ob + h * outputs.stride_oh
        if sizes.requests is not None:
            base_ptr += begin * outputs.stride_on
        store_rows(base_ptr, outputs.stride_on, row, q_len, out, half, width)
        if wide:
            out = gl.where(o_real[:, None], o_high * inverse[:, None], 0.0).to(outputs.out.dtype.element_ty)
            store_rows(base_ptr + width, outputs.stride_on, row, q_len, out, half, width)


@gluon.jit
def consume(HALF: gl.constexpr, queries, ring, eight, work, sizes, carry, parts, outputs, skip, scale, shape):
    """One warpgroup: half of a query block. The next step's logits run on the tensor cores during this one's softmax.

    The softmax of step j hides behind the product of step j - 1 with its values: FlashAttention-3's overlap within a
    warpgroup (Shah et al., 2024, Algorithm 2). Ours are the masks of steps (the first `crossing` ones of the tiles, and
    those of the stripes from `masked` on; the rest runs unmasked), the carry, and the flags of nonfinite sums.
    Where steps may be left out (`skip`), another loop takes this one's place: `skim`.
    """
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    D: gl.constexpr = shape.D
    half: gl.constexpr = shape.BLOCK_M // 2  # rows of one consumer
    width: gl.constexpr = D if D <= 128 else 128  # of one accumulator; a second one, `o_high`, holds what lies beyond
    wide: gl.constexpr = D > 128
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    stage = 0
    phase = 0
    turn = 0
    slot = 0
    lap = 0
    going = True
    while going:
        mbarrier.wait(work.ready.index(slot), lap)
        item = get(work, slot, ITEM)
        tiles = get(work, slot, TILES)
        crossing = get(work, slot, CROSSING)
        steps = tiles + gl.cdiv(get(work, slot, SEEN), BLOCK_N)
        masked = tiles + get(work, slot, UNMASKED)
        first_eight = 0
        last_eight = 0
        if eight.k_desc is not None:
            first_eight = get(work, slot, FIRST_EIGHT)
            last_eight = get(work, slot, LAST_EIGHT)
        number = 0
        pieces = 1
        place = 0
        if work.pieces is not None:
            number = get(work, slot, NUMBER)
            pieces = get(work, slot, PIECES)
            place = get(work, slot, FIRST)
        mbarrier.arrive(work.empty.index(slot), count=1)
        slot, lap = advance(slot, lap, SLOTS)
        going = item < sizes.items
        if going:
            bh, block, length, first, _, low = item_rows(item, sizes, shape)
            q_len = rows_of(sizes, bh // sizes.heads)
            row = low - first + HALF * half  # of the call's queries
            index = row + gl.arange(0, half, layout=s_rows)
            position = index + first
            inside = (index >= 0) & (index < q_len)
            o_index = row + gl.arange(0, half, layout=o_rows)
            o_inside = (o_index >= 0) & (o_index < q_len)
            dims = gl.arange(0, width, layout=gl.SliceLayout(0, o_layout))
            head_row = bh.to(gl.int64) * q_len
            if carry.m is not None:
                taken = inside
                o_taken = o_inside
                if work.pieces is not None:  # the first piece goes on from it
                    taken = inside & (number == 0)
                    o_taken = o_inside & (number == 0)
                m = gl.load(carry.m + head_row + index, mask=taken, other=float("-inf")) * LOG2E  # [half]
                l = gl.load(carry.l + head_row + index, mask=taken, other=0.0)  # noqa: E741 - [half]
                at = carry.acc + (head_row + o_index)[:, None] * D + dims[None, :]
                o = gl.load(at, mask=o_taken[:, None], other=0.0)  # [half, width]
                if wide:
                    o_high = gl.load(at + width, mask=o_taken[:, None], other=0.0)
                if outputs.v_scale is not None:  # a sum of values as they stand in the cache
                    o = o / outputs.v_scale
                    if wide:
                        o_high = o_high / outputs.v_scale
            else:
                m = gl.full([half], float("-inf"), gl.float32, s_rows)
                l = gl.full([half], 0.0, gl.float32, s_rows)  # noqa: E741
                o = gl.full([half, width], 0.0, gl.float32, o_layout)
                if wide:
                    o_high = gl.full([half, width], 0.0, gl.float32, o_layout)
            if skip.below is not None:
                wanting = inside & (position >= 0) & (position < length)
                skipped = 0
                if steps > 0:
                    mbarrier.wait(queries.ready, turn & 1)
                    turn += 1
                    rows = gl.minimum(gl.minimum(row + half, q_len), length - first)
                    rows = gl.maximum(rows - gl.maximum(gl.maximum(row, 0), -first), 0)  # that are real
                    bound = bound_of(skip.below, bh // sizes.heads)
                    other = o
                    if wide:
                        other = o_high
                    m, l, o, other, stage, phase, skipped = skim(
                        HALF, queries, ring, skip, steps, crossing, masked, position, wanting, rows, bound, m, l, o,
                        other, stage, phase, scale, shape,
                    )  # fmt: skip
                    if wide:
                        o_high = other
                gl.store(skip.counts + 2 * (bh.to(gl.int64) * sizes.blocks + block) + HALF, skipped)
            else:
                if steps > 0:
                    q = queries.smem.index(HALF).reshape([half, D])  # [half, D]
                    mbarrier.wait(queries.ready, turn & 1)
                    turn += 1
                    other = o
                    if wide:
                        other = o_high
                    if eight.k_desc is not None:
                        m, l, o, stage, phase = attend_mixed(
                            HALF, q, queries, ring, eight, tiles, crossing, first_eight, last_eight, position, bh, m, l, o,
                            stage, phase, scale, carry.m is not None, sizes, shape,
                        )  # fmt: skip
                    else:
                        m, l, o, other, stage, phase = attend_sixteen(
                            q, queries, ring, 0, steps, crossing, masked, position, m, l, o, other, stage, phase, scale,
                            carry.m is not None, True, shape,
                        )  # fmt: skip
                    if wide:
                        o_high = other
            other = o
            if wide:
                other = o_high
            if work.pieces is None:
                leave(HALF, bh, block, length, first, low, m, l, o, other, sizes, outputs, shape)
            else:
                whole = pieces == 1
                if pieces > 1:
                    m, l, o, other, whole = join(HALF, parts, place, number, pieces, m, l, o, other, shape)
                if whole:
                    leave(HALF, bh, block, length, first, low, m, l, o, other, sizes, outputs, shape)
