"""Slots and steps of the ring in the roles' hands: walk them in turn, and make weights of logits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def advance(slot, phase, COUNT):
    """The slot after this one, and the phase that is waited for there."""
    slot += 1
    if slot == COUNT:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def values_of(ring, stage, shape):
    """Values ``[BLOCK_N, D]`` of a step."""
    return ring.v_smem.index(stage).reshape([shape.BLOCK_N, shape.D])


@gluon.jit
def pin(x):
    """x, computed before whatever follows."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def hide(s, positions, position, LAYOUT: gl.constexpr):
    """Logits with -inf where a key stands behind its row, or nowhere (see produce.HIDDEN)."""
    at = positions.load(LAYOUT).to(gl.uint32, bitcast=True)  # [BLOCK_N]
    return gl.where(at[None, :] <= position.to(gl.uint32, bitcast=True)[:, None], s, float("-inf"))


@gluon.jit
def softmax(s, m, l, scale):
    """One online step: weights, factor for what was summed before, new sum and new maximum (base 2).

    s ``[half, BLOCK_N]``; m, l ``[half]``.
    """
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale - base[:, None])
    alpha = gl.exp2(m - base)
    return p, alpha, l * alpha + gl.sum(p, 1), m_new
