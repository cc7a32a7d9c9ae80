"""Exact attention of a few sampled query rows, summed by key column and by diagonal; streamed over keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


@frozen(eq=False)
class SampledMass:
    """Attention mass of the sampled rows, summed over them; float32 (float64 for float64 calls).

    columns: ``[B, Hq, Nkv]`` by key position on the row's grid. slashes: ``[B, Hq, S]`` by
    ``(row position - key position) // slash``.
    """

    columns: Tensor
    slashes: Tensor


def last_rows(call: AttentionCall, count: int) -> tuple[Tensor, Tensor]:
    """The last `count` real query rows of each batch row: int64 index ``[B, n]`` and bool ``[B, n]``, which exist."""
    geometry = call.geometry
    count = min(count, geometry.q_len)
    behind = (geometry.key_counts() - geometry.first_position()).clamp(0, geometry.q_len)
    index = behind[:, None] - count + torch.arange(count, device=geometry.device)
    safe = index.clamp(min=0)
    return safe, (index >= 0) & torch.gather(geometry.real_queries(), 1, safe)


def sampled_mass(call: AttentionCall, rows: Tensor, real: Tensor, slash: int, chunk: int = 8192) -> SampledMass:
    """Softmax rows of the queries `rows` (index ``[B, n]``, where `real`) over all keys they may see.

    Two passes over the keys in chunks: memory is ``[B, Hq, n, chunk]`` whatever the length.
    """
    geometry, width = call.geometry, call.q.shape[-1]
    batch, heads = geometry.batch, geometry.heads
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    q = torch.gather(call.q, 2, rows[:, None, :, None].expand(-1, heads, -1, width)).to(dtype)
    q = q.reshape(batch, -1, call.group * rows.shape[1], width)
    query = torch.gather(geometry.query_positions(), 1, rows)
    key = geometry.key_positions()

    def logits(keys: slice) -> tuple[Tensor, Tensor]:
        distance = query[:, :, None] - key[:, None, keys]
        seen = (distance >= 0) & (key[:, None, keys] >= 0) & real[:, :, None]
        if geometry.window is not None:
            seen &= distance < geometry.window
        s = q @ call.k[:, :, keys].to(dtype).transpose(-1, -2) * call.softmax_scale
        if call.softcap is not None:
            s = call.softcap * torch.tanh(s / call.softcap)
        s = s.reshape(batch, heads, rows.shape[1], -1)
        return s.masked_fill_(~seen[:, None], -torch.inf), distance

    chunks = [slice(first, min(first + chunk, geometry.kv_len)) for first in range(0, geometry.kv_len, chunk)]
    lse = torch.full((batch, heads, rows.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    for keys in chunks:
        lse = torch.logaddexp(lse, torch.logsumexp(logits(keys)[0], -1))
    base = torch.where(lse == -torch.inf, 0.0, lse)[..., None]
    bins = -(-geometry.kv_len // slash)
    columns = torch.zeros(batch, heads, geometry.kv_len, dtype=dtype, device=q.device)
    slashes = torch.zeros(batch, heads, bins, dtype=dtype, device=q.device)
    for keys in chunks:
        s, distance = logits(keys)
        mass = torch.exp(s - base)
        at = key[:, None, keys].clamp(min=0).expand(-1, heads, -1)
        columns.scatter_add_(2, at, mass.sum(2))
        which = torch.div(distance, slash, rounding_mode="floor").clamp(0, bins - 1)
        slashes.scatter_add_(2, which[:, None].expand_as(mass).flatten(2), mass.flatten(2))
    return SampledMass(columns, slashes)
