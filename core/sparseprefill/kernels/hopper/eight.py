"""Steps in 8 bits: int8 products of queries and keys, e4m3 products of weights and values, each tile's sum flushed.

The recipe is SageAttention2's (Zhang et al., 2024, sections 3.1 to 3.3): keys less their mean, a factor for each query
row and each key tile, weights times 448, a factor for each column of the values, and sums of the matrix unit, which keep
13 bits of a mantissa, added to float32 after every tile. Ours are the mean that is taken from the values, too, the steps
that stay in 16 bits (those that hold a key behind a row, the first key tile, the last query rows, heads whose error is
found too large), and sums of int8 products that are read as floats without a conversion.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparseprefill.kernels.roles.gluon import barrier
from sparseprefill.kernels.roles.quantise import TILE
from sparseprefill.kernels.roles.ring import advance

SHIFT = gl.constexpr(8.807354922057604)
"""log2(448): the largest weight becomes the largest number of e4m3, so that small ones keep their bits."""
MAGIC = gl.constexpr(12582912.0)
"""1.5 * 2**23: as a float, one more is one more in the last bit. Sums of 128 int8 products, below 2**21, that begin with
its bits are floats already."""
MAGIC_BITS = gl.constexpr(0x4B400000)


@gluon.jit
def round_queries(q, q8, mean_ptr, scale, LAYOUT: gl.constexpr, HALF: gl.constexpr, D: gl.constexpr):
    """Put q ``[half, D]`` into q8 as int8. Returns ``[half]`` what makes logits of a row's products, factors of key tiles
    aside, and what the keys' mean adds to them. A NaN of a row is in the second."""
    x = q.load(LAYOUT).to(gl.float32)
    mean = gl.load(mean_ptr + gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT)))  # [D]
    beside = gl.sum(x * mean[None, :], 1) * scale
    largest = gl.maximum(gl.max(gl.abs(x), 1), 1e-30)
    steps = gl.fma(x, (127.0 / largest)[:, None] + gl.zeros_like(x), gl.full_like(x, MAGIC))
    q8.store(steps.to(gl.int32, bitcast=True).to(gl.int8))
    fence_async_shared()
    barrier()
    return largest * (scale / 127.0), beside


@gluon.jit
def start_eight(q8, ring, stage, bits):
    """Logits ``[half, TILE]`` of a step, on their way, in units of a row's and a tile's factor, MAGIC added."""
    k = ring.k_eight.index(stage).reshape([TILE, TILE]).permute((1, 0))  # [D, TILE]
    return warpgroup_mma(q8, k, bits, is_async=True)


@gluon.jit
def weights(s, m, l, factor, beside):
    """One online step, as `ring.softmax`: s as `start_eight` leaves it, factor and beside ``[half]``. m: SHIFT below the
    largest logit, so that the largest weight is 448.

    m is rounded to what leaves one product and one sum to make an exponent of s.
    """
    s = s.to(gl.float32, bitcast=True)
    m_new = gl.maximum(m, gl.fma(gl.max(s, 1) - MAGIC, factor, beside - SHIFT))
    base = gl.fma(gl.full_like(factor, MAGIC), factor, m_new - beside)
    m_new = gl.fma(gl.full_like(factor, -MAGIC), factor, base) + beside
    p = gl.exp2(s * factor[:, None] - base[:, None])
    alpha = gl.exp2(m - m_new)
    return p, alpha, l * alpha + gl.sum(p, 1), m_new


@gluon.jit
def operand(p, LAYOUT: gl.constexpr, HALF: gl.constexpr):
    """Weights ``[half, TILE]`` in e4m3, as the product takes them: keys in the order of `quantise.PLACES`, in which every
    thread has what it needs."""
    p = p.reshape([HALF, TILE // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([HALF, TILE])
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
        "mov.b32 $0, {a, b}; }",
        "=r,r,r,r,r", [gl.convert_layout(p, LAYOUT)], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def start_values(p8, ring, stage, zero):
    """A step's weighted values ``[half, D]``, on their way."""
    v = ring.v_eight.index(stage).reshape([TILE, TILE]).permute((1, 0))  # [TILE, D]
    return warpgroup_mma(p8, v, zero, use_acc=False, is_async=True)


@gluon.jit
def attend_eight(q8, by_row, beside, ring, eight, head, steps, m, l, o, stage, phase, shape):
    """`steps` tiles of an item, at least one, without a mask: m, l ``[half]`` and o ``[half, D]`` with them, the slot
    behind them and its phase. head: of K and V.

    Both products of a step follow each other, and the other consumer's run while this one makes weights: with 8 bits a
    step takes the tensor cores as long as its softmax takes the rest.
    """
    half: gl.constexpr = shape.BLOCK_M // 2
    D: gl.constexpr = shape.D
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dims = head * D + gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
    mean = gl.load(eight.v_mean + dims)[None, :]  # [1, D]
    was: gl.constexpr = o.type.layout
    m_rows: gl.constexpr = m.type.layout
    before_l = gl.convert_layout(l, o_rows)[:, None]
    o = (gl.convert_layout(o, o_layout) - before_l * mean) * gl.load(eight.v_inverse + dims)[None, :]
    m = gl.convert_layout(m, rows) - SHIFT
    l = gl.convert_layout(l, rows) * 448.0  # noqa: E741
    bits = gl.full([half, TILE], MAGIC_BITS, gl.int32, s_layout)
    zero = gl.full([half, D], 0.0, gl.float32, o_layout)
    mbarrier.wait(ring.k_ready.index(stage), phase)
    s = start_eight(q8, ring, stage, bits)
    s = warpgroup_mma_wait(0, deps=[s])
    factor = ring.scales.index(stage).load(rows) * by_row
    mbarrier.arrive(ring.k_empty.index(stage), count=1)
    for _ in range(1, steps):
        before = stage
        phase_before = phase
        stage, phase = advance(stage, phase, shape.STAGES)
        p, alpha, l, m = weights(s, m, l, factor, beside)
        p8 = operand(p, p_layout, half)
        mbarrier.wait(ring.v_ready.index(before), phase_before)
        part = start_values(p8, ring, before, zero)
        mbarrier.wait(ring.k_ready.index(stage), phase)
        s = start_eight(q8, ring, stage, bits)
        part = warpgroup_mma_wait(1, deps=[part])
        mbarrier.arrive(ring.v_empty.index(before), count=1)
        o = o * gl.convert_layout(alpha, o_rows)[:, None] + part
        s = warpgroup_mma_wait(0, deps=[s])
        factor = ring.scales.index(stage).load(rows) * by_row
        mbarrier.arrive(ring.k_empty.index(stage), count=1)
    p, alpha, l, m = weights(s, m, l, factor, beside)
    p8 = operand(p, p_layout, half)
    mbarrier.wait(ring.v_ready.index(stage), phase)
    part = start_values(p8, ring, stage, zero)
    part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(ring.v_empty.index(stage), count=1)
    o = o * gl.convert_layout(alpha, o_rows)[:, None] + part
    stage, phase = advance(stage, phase, shape.STAGES)
    l = l * (1.0 / 448.0)  # noqa: E741
    o = o * gl.load(eight.v_scale + dims)[None, :] + gl.convert_layout(l, o_rows)[:, None] * mean
    m = gl.convert_layout(m + SHIFT, m_rows)
    return m, gl.convert_layout(l, m_rows), gl.convert_layout(o, was), stage, phase
