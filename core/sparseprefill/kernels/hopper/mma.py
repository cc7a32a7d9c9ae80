"""The product of queries and keys by the matrix unit of a warpgroup."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def start_logits(q, ring, stage, zero, shape):
    """Logits ``[half, BLOCK_N]`` of a step whose keys have come, on their way. q: ``[half, D]``; zero: as the result."""
    k = ring.k_smem.index(stage).reshape([shape.BLOCK_N, shape.D]).permute((1, 0))  # [D, BLOCK_N]
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
