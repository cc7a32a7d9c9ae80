"""The largest softmax weight that sampled query rows give to a key of each key tile, by PyTorch's products.

A row is never averaged with others: where a single row looks something up, its weight stands. Of each query tile one
row in `every` is looked at; which ones changes from tile to tile and from head to head, so that heads of a KV group
together see more rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

LOGITS = 1 << 26
"""Logits of sampled rows that are in memory at once, over batch and heads, on a GPU."""

LOGITS_ON_CPU = 1 << 21
"""The same on a CPU: as many as its cache holds."""


@frozen(eq=False)
class Rows:
    """Sampled rows of some query tiles. index: int64 ``[B, H, n]`` among the call's rows. position: int64 of the same
    shape, on the row's grid. real: bool, which of them are tokens of the call. n is tiles times rows of a tile."""

    index: Tensor
    position: Tensor
    real: Tensor


def sampled_rows(call: AttentionCall, first: int, last: int, block: int, every: int) -> Rows:
    """One row in `every` of the call's query tiles from `first` to before `last`, each head with a phase of its own.

    The rows for `every` are among those for any divisor of it.
    """
    geometry = call.geometry
    tile = geometry.tiles(block)[:, first:last]  # [B, t]
    head = torch.arange(geometry.heads, device=tile.device) + call.first_head
    phase = (tile[:, None] + head[:, None]) % every  # [B, H, t]
    offset = torch.arange(0, block, every, device=tile.device)
    position = (tile[:, None] * block + phase)[..., None] + offset
    position = position.flatten(2)
    index = position - geometry.first_position()[:, None, None]
    inside = (index >= 0) & (index < geometry.q_len)
    clamped = index.clamp(0, geometry.q_len - 1)
    real = inside & torch.gather(geometry.real_queries()[:, None].expand(-1, geometry.heads, -1), 2, clamped)
    return Rows(clamped, position, real)


def weights(call: AttentionCall, block: int, every: int) -> Iterator[tuple[slice, Tensor]]:
    """Query tiles, and the largest weight ``[B, Hq, t, c]`` of each in the first c key tiles; no later one is in reach.

    A weight is ``exp(logit - LSE)`` over all keys that the row may see, sinks included. float32 (float64 for float64
    calls). Tiles that no sampled row may see have 0.
    """
    geometry = call.geometry
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(block)
    per_tile = -(-block // every)
    most = LOGITS_ON_CPU if call.q.device.type == "cpu" else LOGITS
    size = max(1, most // (geometry.batch * geometry.heads * per_tile * columns * block))
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    keys = _keys(call, columns * block).to(dtype)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        behind = min(geometry.q_offset // block + last, columns)
        some = sampled_rows(call, first, last, block, every)
        logits = _logits(call, some, keys[:, :, : behind * block], dtype)
        top = logits.unflatten(-1, (behind, block)).amax(-1)  # [B, H, n, c]
        lse = _lse(call, logits)
        share = torch.exp(top - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
        yield slice(first, last), share.unflatten(2, (last - first, per_tile)).amax(3)


def _lse(call: AttentionCall, logits: Tensor) -> Tensor:
    lse = torch.logsumexp(logits, -1)
    return lse if call.sinks is None else torch.logaddexp(lse, call.sinks.to(lse.dtype)[:, None])


def _logits(call: AttentionCall, rows: Rows, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, Hq, n, keys]`` of keys by position; -inf where a row may not look."""
    geometry, group = call.geometry, call.group
    width = call.q.shape[-1]
    q = torch.gather(call.q, 2, rows.index[..., None].expand(-1, -1, -1, width)).to(dtype) * call.softmax_scale
    count = q.shape[2]
    s = q.reshape(q.shape[0], -1, group * count, width) @ keys.transpose(-1, -2)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    s = s.reshape(q.shape[0], geometry.heads, count, -1)
    key = torch.arange(keys.shape[2], device=s.device)
    distance = rows.position[..., None] - key
    hidden = (distance < 0) | ~rows.real[..., None]
    if geometry.window is not None:
        hidden |= distance >= geometry.window
    return s.masked_fill_(hidden, -torch.inf)


def _keys(call: AttentionCall, length: int) -> Tensor:
    """Keys ``[B, Hkv, length, D]`` by position on each batch row's grid, zeros where there is none."""
    geometry = call.geometry
    if geometry.starts is None:
        return functional.pad(call.k, [0, 0, 0, length - geometry.kv_len])
    position = torch.arange(length, device=call.q.device).expand(geometry.batch, -1)
    index = position + geometry.starts[:, None]
    there = (index < geometry.kv_len)[:, None, :, None]
    return torch.where(there, call.keys_at(index.clamp(max=geometry.kv_len - 1)), 0)
