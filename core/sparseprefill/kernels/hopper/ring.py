"""What the roles do with slots and steps of the ring: walk them in turn, and multiply with what lies there."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def advance(slot, phase, COUNT):
    """The slot after this one, and the phase that is waited for there."""
    slot += 1
    if slot == COUNT:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def start_logits(q, ring, stage, zero, shape):
    """Logits ``[half, BLOCK_N]`` of a step whose keys have come, on their way. q: ``[half, D]``; zero: as the result."""
    k = ring.k_smem.index(stage).reshape([shape.BLOCK_N, shape.D]).permute((1, 0))  # [D, BLOCK_N]
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def values_of(ring, stage, shape):
    """Values ``[BLOCK_N, D]`` of a step."""
    return ring.v_smem.index(stage).reshape([shape.BLOCK_N, shape.D])
