"""The calls that are measured."""

from __future__ import annotations

from functools import lru_cache

import torch

from sparseprefill.call import AttentionCall
from sparseprefill.testing.inputs import tensors

from .case import Shape

STRENGTH = 14.0
"""By how much planted logits stand out in the plain kinds of inputs."""


@lru_cache(maxsize=1)
def call_of(shape: Shape, kind: str, seed: int, device: torch.device) -> AttentionCall:
    """q, k, v of a kind on a device; the last one made is kept. ParameterError for what a kind cannot give."""
    if kind == "captured":
        from .captured import captured_call

        return captured_call(shape, seed, device)
    q, k, v = tensors(
        kind,
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        q_len=shape.length,
        kv_len=shape.length,
        head_dim=shape.head_dim,
        strength=STRENGTH,
        seed=seed,
        device=device,
        dtype=shape.torch_dtype,
    )
    if shape.batch == 1:
        return AttentionCall(q, k, v)
    return AttentionCall(q, k, v, lengths=torch.tensor(shape.lengths, dtype=torch.int32, device=device))
