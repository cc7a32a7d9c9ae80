"""Skip-softmax in the consumers' loop, which leaves out steps; the producer's part is `roles.fetch`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sparseprefill.kernels.hopper.mma import start_logits
from sparseprefill.kernels.roles.ring import advance, hide, pin, values_of


@gluon.jit
def bound_of(below_ptr, b):
    """log2 of the threshold of batch row `b`; -inf, below which nothing lies, where it is 0, or 1 and more."""
    below = gl.load(below_ptr + b)
    inside = (below > 0.0) & (below < 1.0)
    return gl.where(inside, gl.log2(gl.where(inside, below, 1.0)), float("-inf"))


@gluon.jit
def weigh(s, top, m, l, scale):
    """`softmax` of logits whose row maxima `top` ``[half]`` are known, scaled: weights, factor, new sum and maximum."""
    m_new = gl.maximum(m, top)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale - base[:, None])
    alpha = gl.exp2(m - base)
    return p, alpha, l * alpha + gl.sum(p, 1), m_new


@gluon.jit
def judge(s, m, bound, real, ring, skip, stage, NUMBER: gl.constexpr, scale):
    """True if some row of the warpgroup wants the step, told to the producer if it waits for that; scaled row maxima.

    A row without a maximum yet (-inf) wants every step, and so does everybody where `bound` is -inf: one comparison.
    """
    top = gl.max(s, 1) * scale  # [half]
    wants = gl.max(gl.where(real & ((top < m + bound) == 0), 1, 0), 0)
    if skip.votes is not None:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        skip.votes.index(2 * stage + NUMBER).store(gl.full([1], 0, gl.int32, one) + wants)
        mbarrier.arrive(skip.told.index(2 * stage + NUMBER), count=1)
    return top, wants


@gluon.jit
def pairs_of(positions, position, real, LAYOUT: gl.constexpr):
    """Number of pairs of real rows in a masked step."""
    at = positions.load(LAYOUT).to(gl.uint32, bitcast=True)  # [BLOCK_N]
    seen = (at[None, :] <= position.to(gl.uint32, bitcast=True)[:, None]) & real[:, None]  # [half, BLOCK_N]
    return gl.sum(gl.sum(gl.where(seen, 1, 0), 1), 0)


@gluon.jit
def skim(
    NUMBER: gl.constexpr, queries, ring, skip, steps, crossing, masked, position, real, rows, bound, m, l, o, o_high,
    stage, phase, scale, shape,
):  # fmt: skip
    """An item's steps, of which those are left out that no row of the warpgroup wants (BLASST, Algorithm 1).

    Two loops in turn. One looks for a step that is wanted: a product of queries and keys, its row maxima, the vote, and
    nothing else. From there the other runs as `consume` does, with the softmax of a step behind the product of the one
    before with its values, until a step is not wanted. rows: how many are real, which unmasked steps count by.

    The state (m, l, o and, of wide heads, o_high), the ring's stage and phase, and the pairs left out.
    """
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    D: gl.constexpr = shape.D
    half: gl.constexpr = shape.BLOCK_M // 2
    width: gl.constexpr = D if D <= 128 else 128
    wide: gl.constexpr = D > 128
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    s_columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = ring.k_smem.dtype
    q = queries.smem.index(NUMBER).reshape([half, D])  # [half, D]
    zero = gl.full([half, BLOCK_N], 0.0, gl.float32, s_layout)
    skipped = 0
    wants = 0
    before = stage  # where the last step judged lies, and its values
    phase_before = phase
    j = 0  # steps judged
    while j < steps:
        s = zero
        top = m
        while (wants == 0) & (j < steps):
            mbarrier.wait(ring.k_ready.index(stage), phase)
            s = start_logits(q, ring, stage, zero, shape)  # [half, BLOCK_N]
            if j > 0:  # the values of a step left out, or nothing, are there: their place is free
                mbarrier.wait(ring.v_ready.index(before), phase_before)
                mbarrier.arrive(ring.v_empty.index(before), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
            hidden = (j < crossing) | (j >= masked)
            if hidden:
                s = hide(s, ring.positions.index(stage), position, s_columns)
            top, wants = judge(s, m, bound, real, ring, skip, stage, NUMBER, scale)
            if wants == 0:
                gone = rows * BLOCK_N
                if hidden:
                    gone = pairs_of(ring.positions.index(stage), position, real, s_columns)
                skipped += gone
            mbarrier.arrive(ring.k_empty.index(stage), count=1)
            before = stage
            phase_before = phase
            stage, phase = advance(stage, phase, shape.STAGES)
            j += 1
        if wants > 0:
            p, alpha, l, m = weigh(s, top, m, l, scale)
            factor = gl.convert_layout(alpha, o_rows)[:, None]
            o = o * factor
            if wide:
                o_high = o_high * factor
            p16 = gl.convert_layout(p.to(dtype), p_layout)  # [half, BLOCK_N]
            while (wants > 0) & (j < steps):
                mbarrier.wait(ring.k_ready.index(stage), phase)
                ahead = start_logits(q, ring, stage, zero, shape)  # [half, BLOCK_N]
                mbarrier.wait(ring.v_ready.index(before), phase_before)
                v = values_of(ring, before, shape)  # [BLOCK_N, D]
                if wide:
                    sum_low = warpgroup_mma(p16, v.slice(0, width, dim=1), o, is_async=True)  # [half, width]
                    sum_high = warpgroup_mma(p16, v.slice(width, width, dim=1), o_high, is_async=True)
                else:
                    sum_low = warpgroup_mma(p16, v, o, is_async=True)  # [half, width]
                ahead = warpgroup_mma_wait(2 if wide else 1, deps=[ahead])
                hidden = (j < crossing) | (j >= masked)
                if hidden:
                    ahead = hide(ahead, ring.positions.index(stage), position, s_columns)
                peak, wants = judge(ahead, m, bound, real, ring, skip, stage, NUMBER, scale)
                if wants > 0:
                    mbarrier.arrive(ring.k_empty.index(stage), count=1)
                    weights, shrink, l, m = weigh(ahead, peak, m, l, scale)
                    # The wait for the values stays behind the softmax: see `consume`. That for the keys, which stands there,
                    # could be a lap late: with votes, keys come before the values of the step before have been used.
                    l = pin(l)  # noqa: E741
                    mbarrier.wait(ring.v_ready.index(before), phase_before)
                    if wide:
                        o, o_high = warpgroup_mma_wait(0, deps=[sum_low, sum_high])
                    else:
                        o = warpgroup_mma_wait(0, deps=[sum_low])
                    less = gl.convert_layout(shrink, o_rows)[:, None]
                    o = o * less
                    if wide:
                        o_high = o_high * less
                    p16 = gl.convert_layout(weights.to(dtype), p_layout)  # [half, BLOCK_N]
                else:
                    gone = rows * BLOCK_N
                    if hidden:
                        gone = pairs_of(ring.positions.index(stage), position, real, s_columns)
                    skipped += gone
                    mbarrier.arrive(ring.k_empty.index(stage), count=1)
                    if wide:
                        o, o_high = warpgroup_mma_wait(0, deps=[sum_low, sum_high])
                    else:
                        o = warpgroup_mma_wait(0, deps=[sum_low])
                mbarrier.arrive(ring.v_empty.index(before), count=1)
                before = stage
                phase_before = phase
                stage, phase = advance(stage, phase, shape.STAGES)
                j += 1
            if wants > 0:
                mbarrier.wait(ring.v_ready.index(before), phase_before)
                v = values_of(ring, before, shape)  # [BLOCK_N, D]
                if wide:
                    o = warpgroup_mma(p16, v.slice(0, width, dim=1), o, is_async=True)  # [half, width]
                    o_high = warpgroup_mma(p16, v.slice(width, width, dim=1), o_high, is_async=True)
                    o, o_high = warpgroup_mma_wait(0, deps=[o, o_high])
                else:
                    o = warpgroup_mma(p16, v, o, is_async=True)  # [half, width]
                    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(queries.empty, count=1)
    mbarrier.wait(ring.v_ready.index(before), phase_before)
    mbarrier.arrive(ring.v_empty.index(before), count=1)
    return m, l, o, o_high, stage, phase, skipped
