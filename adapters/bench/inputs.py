"""The calls that are measured."""

from __future__ import annotations

from functools import lru_cache

import torch
from attrs import evolve

from sparseprefill.call import AttentionCall
from sparseprefill.pages import Pages
from sparseprefill.testing.inputs import tensors

from .case import Shape

STRENGTH = 14.0
"""By how much planted logits stand out in the plain kinds of inputs."""


@lru_cache(maxsize=1)
def call_of(shape: Shape, kind: str, seed: int, device: torch.device) -> AttentionCall:
    """q, k, v of a kind on a device; the last one made is kept. ParameterError for what a kind cannot give."""
    if kind == "captured":
        from .captured import captured_call

        found = captured_call(shape, seed, device)
        return evolve(found, q=found.q[:, :, -shape.queries :])
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
        return AttentionCall(q[:, :, -shape.queries :], k, v)
    return AttentionCall(q, k, v, lengths=torch.tensor(shape.lengths, dtype=torch.int32, device=device))


def in_pages(call: AttentionCall, page: int, seed: int) -> AttentionCall:
    """The call with K and V side by side in pages of a cache, in random order; heads side by side within a token."""
    _, heads, length, size = call.k.shape
    count, value = -(-length // page), call.value_dim
    source = torch.Generator(call.q.device).manual_seed(seed)
    table = torch.randperm(count, generator=source, device=call.q.device)
    cache = call.k.new_zeros(count, page, heads, size + value)
    token = torch.arange(length, device=table.device)
    cache[table[token // page], token % page] = torch.cat([call.k, call.v], -1)[0].transpose(0, 1)
    k, v = cache.split([size, value], -1)
    pages = Pages(k, v, table.to(torch.int32), length)
    return evolve(call, k=pages, v=pages)


def uncopied(call: AttentionCall) -> AttentionCall:
    """The call as a server makes it anew: what was copied of its pages is forgotten."""
    if call.pages is None:
        return call
    pages = evolve(call.pages)
    return evolve(call, k=pages, v=pages)
