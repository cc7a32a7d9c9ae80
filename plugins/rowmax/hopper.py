"""`kernels.maxima_kernel` for Hopper, of keys in e4m3: products of one key tile run while maxima of another are found.

A program has three partitions: two consumers of four warps, each with 128 sampled rows of one head, and a producer of
one warp, which fetches the key tiles that both multiply with. A consumer has two accumulators, so that the tensor cores
need not wait for its maxima; products are summed in float16, of which a maximum takes half as long.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import DistributedLinearLayout, NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparseprefill.kernels.roles.arguments import Sizes
from sparseprefill.kernels.roles.gluon import barrier, load_block, reinterpret
from sparseprefill.kernels.roles.paging import batch_row
from sparseprefill.kernels.roles.ring import advance
from sparseprefill.kernels.settings import FUSED, power_of_two

from .kernels import HOPPER_TILE, LARGEST, NORM, RUNTIME

TILE = gl.constexpr(HOPPER_TILE)
"""Keys of a tile, and sampled rows of a consumer."""
AT_ONCE = gl.constexpr(32)
"""Of them, those that are rounded at once."""
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
OPTIONS = {"STAGES": 6, "REGISTERS": (232, 24), "num_warps": 4, **FUSED}
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


class Tiles(NamedTuple):
    """Key tiles in shared memory ``[STAGES, BLOCK, D]``, and what says of a stage that it is filled, or free again."""

    smem: Any
    ready: Any
    empty: Any


class Queries(NamedTuple):
    """Sampled rows of both consumers in shared memory, AT_ONCE by AT_ONCE: in e4m3 ``[2 * BLOCK / AT_ONCE, AT_ONCE, D]``, and
    float32 ``[2 * BLOCK / AT_ONCE, AT_ONCE]``, what undoes the power of two that each was rounded with."""

    smem: Any
    inverse: Any


class Span(NamedTuple):
    """Key tiles of a program: the first, one past the last, and those that are fetched, which may repeat the last."""

    first: Any
    last: Any
    count: Any


class Lines(NamedTuple):
    """Rows of a program. low, high: positions that hold queries. first: position of the call's row 0. tile: the query
    tile from which rows are numbered. block: the program's first block of rows. head: of the layer."""

    low: Any
    high: Any
    first: Any
    tile: Any
    block: Any
    head: Any


class Logits(NamedTuple):
    """Factors that make logits of products: scale, factors of key tiles, and softcap or None."""

    scale: Any
    factors: Any
    softcap: Any


class Out(NamedTuple):
    """Places of a head's maxima and a program's sums; blocks and tiles of a head, programs that share a row's tiles."""

    maxima: Any
    sums: Any
    blocks: Any
    reach: Any
    part: Any
    parts: Any


@gluon.jit
def _position(number, lines, EVERY: gl.constexpr, SHIFT: gl.constexpr):
    """Positions of sampled rows by number: see `kernels._sampled`."""
    PER: gl.constexpr = TILE // EVERY
    tile = lines.tile + number // PER
    return tile * TILE + (tile + lines.head * SHIFT) % EVERY + number % PER * EVERY


@gluon.jit
def _larger(a, b):
    """The larger of float16 numbers, two at a time."""
    return gl.inline_asm_elementwise(
        "max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def _row_max(s, LAYOUT: gl.constexpr):
    """float32: largest of each row of s ``[BLOCK, BLOCK]``."""
    a, b = s.reshape([TILE, 2, 64]).permute([0, 2, 1]).split()
    a, b = _larger(a, b).reshape([TILE, 2, 32]).permute([0, 2, 1]).split()
    a, b = _larger(a, b).reshape([TILE, 2, 16]).permute([0, 2, 1]).split()
    a, b = _larger(a, b).reshape([TILE, 2, 8]).permute([0, 2, 1]).split()
    return gl.convert_layout(gl.max(_larger(a, b), 1), LAYOUT).to(gl.float32)


@gluon.jit
def _column_max(s, WIDTH: gl.constexpr, QUADS: gl.constexpr, LAYOUT: gl.constexpr):
    """float32 ``[BLOCK, BLOCK / WIDTH]``: largest of each row of s ``[BLOCK, BLOCK]`` in each column of WIDTH keys.

    The four threads that hold a row's products change places in QUADS, so that each has some columns to itself.
    """
    COLUMNS: gl.constexpr = TILE // WIDTH
    a, b = s.reshape([TILE, COLUMNS, 2, WIDTH // 2]).permute([0, 1, 3, 2]).split()
    m = _larger(a, b)
    if WIDTH >= 32:
        a, b = m.reshape([TILE, COLUMNS, 2, WIDTH // 4]).permute([0, 1, 3, 2]).split()
        m = _larger(a, b)
    if WIDTH >= 64:
        a, b = m.reshape([TILE, COLUMNS, 2, WIDTH // 8]).permute([0, 1, 3, 2]).split()
        m = _larger(a, b)
    a, b = m.reshape([TILE, COLUMNS, 4, 2]).split()
    m = gl.convert_layout(_larger(a, b), QUADS)  # [BLOCK, COLUMNS, 4]
    a, b = m.reshape([TILE, COLUMNS, 2, 2]).split()
    a, b = _larger(a, b).split()
    return gl.convert_layout(_larger(a, b), LAYOUT).to(gl.float32)


@gluon.jit
def _logits(m, scales, softcap):
    """Base-2 logits of products m."""
    m = m * scales
    if softcap is not None:
        capped = (2.0 / (1.0 + gl.exp2(-2.0 * m / softcap)) - 1.0) * softcap * LOG2E
        m = gl.where(m == float("-inf"), m, capped)
    return m


@gluon.jit
def _leave_columns(
    s, tile, level, total, position, scales, clear, last, line, logits,
    WIDTH: gl.constexpr, PER: gl.constexpr, LAYOUT: gl.constexpr, QUADS: gl.constexpr, COLUMN: gl.constexpr,
):  # fmt: skip
    """Stores the maxima of a tile's products s in columns of WIDTH keys, as logits; level, total with them, as
    `kernels._all_joined`. scales, level, total, line: laid out as rows of COLUMN."""
    COLUMNS: gl.constexpr = TILE // WIDTH
    if tile >= clear:
        at = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
        s = gl.where(at[None, :] <= position[:, None], s, float("-inf"))
    m = _column_max(s, WIDTH, QUADS, COLUMN)  # [BLOCK, COLUMNS]
    m = _logits(m, (scales * gl.load(logits.factors + tile))[:, None], logits.softcap)
    stored = gl.minimum(m, LARGEST).to(gl.float16)
    if tile < last:
        column = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, COLUMN))
        gl.store(line[:, None] + column[None, :] * PER, stored)
        m = stored.to(gl.float32)
        top = gl.maximum(level, gl.max(m, 1))
        at = gl.where(top == float("-inf"), 0.0, top)
        before = gl.where(level == at, 1.0, gl.exp2(level - at))  # also of infinity
        more = gl.where(m == at[:, None], 1.0, gl.exp2(m - at[:, None]))
        level, total = top, total * before + gl.sum(more, 1)
    return level, total


@gluon.jit
def _leave(s, tile, level, total, position, scales, clear, last, line, logits, PER: gl.constexpr, LAYOUT: gl.constexpr):
    """Stores the maxima of a tile's products s, as logits; level, total with them, as `kernels._joined`."""
    if tile >= clear:
        at = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
        s = gl.where(at[None, :] <= position[:, None], s, float("-inf"))
    m = _row_max(s, gl.SliceLayout(1, LAYOUT))
    m = _logits(m, scales * gl.load(logits.factors + tile), logits.softcap)
    stored = gl.minimum(m, LARGEST).to(gl.float16)
    if tile < last:
        gl.store(line + tile * PER, stored)
        m = stored.to(gl.float32)
        less = gl.exp2(gl.where(m == level, 0.0, -gl.abs(m - level)))
        less_of_it = gl.where(m == float("-inf"), 0.0, less)
        total = gl.where(m > level, total * less + 1.0, total + less_of_it)
        level = gl.maximum(level, m)
    return level, total


@gluon.jit
def _multiply(q, tiles, stage, phase, zero):
    """Products ``[BLOCK, BLOCK]`` with the keys of a stage, on their way."""
    mbarrier.wait(tiles.ready.index(stage), phase)
    return warpgroup_mma(q, tiles.smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _round_queries(
    NUMBER: gl.constexpr, q_ptr, stride_qn, queries, block, lines,
    EVERY: gl.constexpr, SHIFT: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Puts a block's rows into shared memory in e4m3, each times a power of two, and the inverse of that beside them.

    Some rows after others: written out for all at once it took a launch 10 us longer (docs/performance.md).
    """
    by_row: gl.constexpr = gl.BlockedLayout([1, 16], [512 // BLOCK_D, BLOCK_D // 16], [4, 1], [1, 0])
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, by_row))
    for i in range(TILE // AT_ONCE):
        number = block * TILE + i * AT_ONCE + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, by_row))
        position = _position(number, lines, EVERY, SHIFT)
        real = (position >= lines.low) & (position < lines.high)
        at = q_ptr + (position - lines.first).to(gl.int64)[:, None] * stride_qn + dims[None, :]
        q = gl.load(at, mask=real[:, None] & (dims < D)[None, :], other=0.0).to(gl.float32)  # [AT_ONCE, D]
        largest = gl.max(gl.abs(q), 1)
        part = q / gl.where(largest > 0.0, largest, 1.0)[:, None]
        norm = largest * gl.sqrt(gl.sum(part * part, 1))
        power = gl.floor(gl.log2(1.0 / gl.where(norm > 0.0, norm, 1.0) * NORM))
        power = gl.minimum(gl.maximum(power, -100.0), 100.0)
        q = gl.minimum(gl.maximum(q * gl.exp2(power)[:, None], -448.0), 448.0)
        place = NUMBER * (TILE // AT_ONCE) + i
        queries.smem.index(place).store(q.to(gl.float8e4nv))
        queries.inverse.index(place).store(gl.exp2(-power))
    fence_async_shared()
    barrier()


@gluon.jit
def _consume(
    NUMBER: gl.constexpr, q_ptr, stride_qn, queries, tiles, span, lines, out, logits,
    WIDTH: gl.constexpr, QUADS: gl.constexpr, COLUMN: gl.constexpr,
    EVERY: gl.constexpr, SHIFT: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Maxima of 128 sampled rows. QUADS, COLUMN: layouts of maxima in columns of WIDTH keys, fewer than a tile's."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    own: gl.constexpr = rows if WIDTH == TILE else gl.SliceLayout(1, COLUMN)
    PER: gl.constexpr = TILE // EVERY
    block = lines.block + NUMBER
    level = gl.full([TILE], float("-inf"), gl.float32, own)
    total = gl.full([TILE], 0.0, gl.float32, own)
    if span.count > 0:
        _round_queries(NUMBER, q_ptr, stride_qn, queries, block, lines, EVERY, SHIFT, D, BLOCK_D)
        scales = reinterpret(queries.inverse, gl.float32, [2, TILE], FLAT).index(NUMBER).load(own) * logits.scale
        position = _position(block * TILE + gl.arange(0, TILE, layout=rows), lines, EVERY, SHIFT)
        number = block * TILE + gl.arange(0, TILE, layout=own)
        first = lines.tile + block * TILE // PER  # query tile of the first row
        clear = gl.maximum(first, 0)
        last = gl.minimum(
            gl.minimum(lines.tile + (block * TILE + TILE - 1) // PER + 1, (lines.high + TILE - 1) // TILE), span.last
        )
        if block >= out.blocks:
            last = 0
        line = out.maxima + number // PER * out.reach * PER + number % PER
        q = reinterpret(queries.smem, gl.float8e4nv, [2, TILE, BLOCK_D], queries.smem.layout).index(NUMBER)
        zero = gl.full([TILE, TILE], 0.0, gl.float16, layout)
        stage = 0
        phase = 0
        tile = span.first
        for _ in range(span.count // 2):
            # No product is under way when a round ends: ptxas would wait for each one.
            a = _multiply(q, tiles, stage, phase, zero)
            after, phase_after = advance(stage, phase, STAGES)
            b = _multiply(q, tiles, after, phase_after, zero)
            s = warpgroup_mma_wait(1, deps=[a])
            mbarrier.arrive(tiles.empty.index(stage), count=1)
            if WIDTH == TILE:
                level, total = _leave(s, tile, level, total, position, scales, clear, last, line, logits, PER, layout)
            else:
                level, total = _leave_columns(
                    s, tile, level, total, position, scales, clear, last, line, logits,
                    WIDTH, PER, layout, QUADS, COLUMN,
                )  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[b])
            mbarrier.arrive(tiles.empty.index(after), count=1)
            if WIDTH == TILE:
                level, total = _leave(
                    s, tile + 1, level, total, position, scales, clear, last, line, logits, PER, layout
                )
            else:
                level, total = _leave_columns(
                    s, tile + 1, level, total, position, scales, clear, last, line, logits,
                    WIDTH, PER, layout, QUADS, COLUMN,
                )  # fmt: skip
            tile += 2
            stage, phase = advance(after, phase_after, STAGES)
    if block < out.blocks:
        at = (block * out.parts + out.part).to(gl.int64) * TILE + gl.arange(0, TILE, layout=own)
        gl.store(out.sums + at, level + gl.log2(total))


@gluon.jit
def _produce(descriptor, line, tiles, span, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Fetches the key tiles of a program."""
    stage = 0
    phase = 1
    for j in range(span.count):
        mbarrier.wait(tiles.empty.index(stage), phase)
        mbarrier.expect(tiles.ready.index(stage), TILE * BLOCK_D)
        tile = gl.minimum(span.first + j, span.last - 1)
        load_block(descriptor, [line + tile * TILE, 0], tiles.ready.index(stage), tiles.smem.index(stage))
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit(do_not_specialize=(*RUNTIME, "each"))
def hopper_maxima_kernel(
    maxima_ptr, sums_ptr, q_ptr, factors_ptr, descriptor, starts_ptr, lengths_ptr,
    stride_qb, stride_qh, stride_qn,
    scale, softcap, q_offset, q_len, kv_len, window,
    heads, kv_group, first_head, first_tile, blocks, reach, columns, each,
    WIDTH: gl.constexpr, QUADS: gl.constexpr, COLUMN: gl.constexpr,
    EVERY: gl.constexpr, SHIFT: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, SOFTCAP: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """The work of `kernels.maxima_kernel`, for tiles of 128 keys and blocks of 128 sampled rows, without a window.

    WIDTH: keys of a column, 16, 32, 64 or the whole tile; of narrower ones than that, QUADS and COLUMN are layouts, see
    `layouts`.

    One program: two such blocks of a query head. descriptor: of the rounded keys ``[B * Hkv * columns * BLOCK, D]``.
    """
    pid = gl.program_id(0)
    member = pid % kv_group
    rest = pid // kv_group
    both = (blocks + 1) // 2
    block = (both - 1 - rest % both) * 2
    pair = rest // both
    kv_heads = heads // kv_group
    b = pair // kv_heads
    kv = pair % kv_heads
    h = kv * kv_group + member
    sizes = Sizes(starts_ptr, lengths_ptr, q_offset, q_len, kv_len, blocks, both, heads, kv_group, None)
    _, length, first = batch_row(sizes, b)
    tile = first // TILE
    if first < 0:
        tile = -((TILE - 1 - first) // TILE)
    tile += first_tile
    high = gl.minimum(first + q_len, length)
    lines = Lines(gl.maximum(first, 0), high, first, tile, block, first_head + h)
    PER: gl.constexpr = TILE // EVERY
    # Key tiles that the last row of both blocks may see.
    last = gl.minimum(tile + ((block + 2) * TILE - 1) // PER + 1, (high + TILE - 1) // TILE)
    begin = gl.program_id(1) * each
    last = gl.minimum(gl.minimum(last, reach // (TILE // WIDTH)), begin + each)
    count = gl.maximum(last - begin, 0)
    if count > 0:
        count = (count + 1) // 2 * 2
    span = Span(begin, last, count)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    shared: gl.constexpr = descriptor.layout
    ROUNDS: gl.constexpr = 2 * TILE // AT_ONCE
    queries = Queries(
        gl.allocate_shared_memory(gl.float8e4nv, [ROUNDS, AT_ONCE, BLOCK_D], shared),
        gl.allocate_shared_memory(gl.float32, [ROUNDS, AT_ONCE], FLAT),
    )
    k_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, BLOCK_D], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    tiles = Tiles(k_smem, ready, empty)
    head = (b * heads + h).to(gl.int64) * blocks
    out = Out(
        maxima_ptr + (b * heads + h).to(gl.int64) * ((blocks * TILE + PER - 1) // PER) * reach * PER,
        sums_ptr + head * gl.num_programs(1) * TILE, blocks, reach,
        gl.program_id(1), gl.num_programs(1),
    )  # fmt: skip
    q_ptr += b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
    line = (b * kv_heads + kv) * columns * TILE
    cap = None
    if SOFTCAP:
        cap = softcap
    logits = Logits(scale, factors_ptr + (b * kv_heads + kv).to(gl.int64) * columns, cap)
    gl.warp_specialize(
        [
            (_consume, (0, q_ptr, stride_qn, queries, tiles, span, lines, out, logits,
                        WIDTH, QUADS, COLUMN, EVERY, SHIFT, D, BLOCK_D, STAGES)),
            (_consume, (1, q_ptr, stride_qn, queries, tiles, span, lines, out, logits,
                        WIDTH, QUADS, COLUMN, EVERY, SHIFT, D, BLOCK_D, STAGES)),
            (_produce, (descriptor, line, tiles, span, BLOCK_D, STAGES)),
        ],
        [4, 1],
        [REGISTERS[0], REGISTERS[1]],
    )  # fmt: skip


@cache
def layouts(width: int) -> dict[str, Any]:
    """QUADS ``[BLOCK, columns, 4]`` and COLUMN ``[BLOCK, columns]`` of `hopper_maxima_kernel` for columns of `width`
    keys.

    The product lays a row's keys out over four threads, two by two, and a warp's 16 rows over the rest. In QUADS a
    thread has all four parts of some columns, in COLUMN what is left of them: with 4 columns one each, with 8 two; of 2,
    two threads each have the same.
    """
    if width == HOPPER_TILE:
        return {"WIDTH": width, "QUADS": None, "COLUMN": None}
    columns = HOPPER_TILE // width
    bits = [1 << bit for bit in range(columns.bit_length() - 1)]
    own, apart = bits[:-2], [*bits[-2:], 0][:2]
    shape = [HOPPER_TILE, columns]
    quads = DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *([0, bit, 0] for bit in own), [8, 0, 0], [64, 0, 0]],
        [*([0, bit, 0] for bit in apart), [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [*shape, 4],
    )  # fmt: skip
    column = DistributedLinearLayout(
        [*([0, bit] for bit in own), [8, 0], [64, 0]],
        [*([0, bit] for bit in apart), [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], shape,
    )  # fmt: skip
    return {"WIDTH": width, "QUADS": quads, "COLUMN": column}


def descriptor(k: Tensor) -> TensorDescriptor:
    """A descriptor of the rounded keys ``[B, Hkv, N, D]``: blocks of one key tile."""
    lines, width = k.view(-1, k.shape[-1]), power_of_two(k.shape[-1])
    return TensorDescriptor(lines, list(lines.shape), list(lines.stride()), [HOPPER_TILE, width], _shared(width))


@cache
def _shared(width: int) -> NVMMASharedLayout:
    """Of a key tile in shared memory."""
    return NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8, rank=2)
