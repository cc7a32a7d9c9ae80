"""Algorithm 1: antidiagonal scores of key tiles, a few query tiles at a time.

Queries and keys come in groups of `stride` tokens on each row's own token grid, zeros where there is no token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

LOGITS = 1 << 25
"""Logits of groups that are in memory at once, over batch and heads."""

PARTIALS = 1 << 27
"""Partial sums that the kernels leave in memory at once, float32, over batch and heads."""

LEAST, PARTS = 16, 8
"""Query tiles of a part at least, and parts of a call: each part looks at the keys up to its own end alone."""


def key_groups(call: AttentionCall, length: int, stride: int) -> Tensor:
    """Keys at positions 0 to `length`, each group in reverse order: ``[B, Hkv, length / stride, stride, D]``.

    Against queries in their order, one product over ``stride * D`` then sums an antidiagonal.
    """
    geometry, k = call.geometry, call.k
    if geometry.starts is None and geometry.lengths is None:
        placed = functional.pad(k, [0, 0, 0, length - k.shape[2]])
    else:
        position = torch.arange(length, device=k.device).expand(geometry.batch, -1)
        real = position < geometry.key_counts()[:, None]
        index = position if geometry.starts is None else position + geometry.starts[:, None]
        placed = _pick(k, index, real)
    grouped: Tensor = placed.unflatten(2, (-1, stride))
    return grouped.flip(3)


def query_tiles(call: AttentionCall, first: int, last: int, block: int) -> tuple[Tensor, Tensor]:
    """Query tiles `first` to `last` of the call: ``[B, Hq, n, D]`` with n tokens, and bool ``[B, n]``, which exist."""
    geometry, q = call.geometry, call.q
    if geometry.starts is None and geometry.lengths is None:
        begin = (geometry.q_offset // block + first) * block - geometry.q_offset
        end = begin + (last - first) * block
        front, back = max(0, -begin), max(0, end - geometry.q_len)
        rows = q[:, :, begin + front : end - back]
        real = torch.ones(1, rows.shape[2], dtype=torch.bool, device=q.device).expand(geometry.batch, -1)
        if not front and not back:
            return rows, real
        return functional.pad(rows, [0, 0, front, back]), functional.pad(real, [front, back])
    begins = (geometry.first_tile(block) + first) * block
    index, real = geometry.locate(begins[:, None] + torch.arange((last - first) * block, device=q.device))
    return _pick(q, index, real), real


def _pick(x: Tensor, index: Tensor, real: Tensor) -> Tensor:
    where = index.clamp(0, x.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return torch.where(real[:, None, :, None], torch.gather(x, 2, where), 0)


def scores_workspace(call: AttentionCall, stride: int, block: int) -> int:
    """Bytes that the scores of tiles take, with the logits or sums of groups that are in memory on the way."""
    geometry = call.geometry
    pairs = geometry.batch * geometry.heads * geometry.tile_rows(block) * geometry.tile_columns(block)
    return 4 * pairs + 5 * min(PARTIALS, max(4 * LOGITS, 2 * pairs * (block // stride)))


def tile_scores(call: AttentionCall, stride: int, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Query tiles, and their scores ``[B, Hq, r, c]`` of the first c key tiles; no later one is in reach.

    The score of a key tile is the sum, over the query tile's groups, of the softmax over key groups of the mean
    antidiagonal logit: ``scale / stride * sum``, for whole groups. float32 (float64 for float64 calls).
    """
    geometry, per_tile = call.geometry, block // stride
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(block)
    size = max(1, LOGITS // (geometry.batch * geometry.heads * per_tile * per_tile * columns))
    size = min(size, max(LEAST, -(-rows // PARTS)))
    keys = key_groups(call, columns * block, stride)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        behind = min(geometry.q_offset // block + last, columns)  # rows that start later stand no further
        q, real = query_tiles(call, first, last, block)
        tiles = geometry.tiles(block)[:, first:last]
        groups = (tiles[..., None] * per_tile + torch.arange(per_tile, device=q.device)).flatten(1)
        attention = _group_attention(call, q, real, keys[:, :, : behind * per_tile], groups)
        yield slice(first, last), attention.unflatten(3, (-1, per_tile)).sum(4).unflatten(2, (-1, per_tile)).sum(3)


def _group_attention(call: AttentionCall, q: Tensor, real: Tensor, keys: Tensor, groups: Tensor) -> Tensor:
    """Softmax ``[B, Hq, g, c]`` over key groups; groups: int64 ``[B, g]``, which ones of the row the queries are."""
    window, stride = call.geometry.window, keys.shape[3]
    column = torch.arange(keys.shape[2], device=q.device)
    lag = groups[..., None] - column
    q, real = q.unflatten(2, (-1, stride)), real.unflatten(1, (-1, stride))
    half = stride // 2  # on the diagonal, query a meets key stride - 1 - a, which is no later from here on
    all_rows, late_rows = real.sum(-1), real[..., half:].sum(-1)
    seen = ((lag > 0) & (all_rows > 0)[..., None]) | ((lag == 0) & (late_rows > 0)[..., None])
    if window is not None:
        seen &= (lag == 0) | (lag * stride - stride + 1 < window)
    own = groups.clamp(0, keys.shape[2] - 1)
    logits = _products(q, keys).div_(all_rows.clamp(min=1)[:, None, :, None])
    diagonal = _own_products(q, keys, real, own, half) / late_rows.clamp(min=1)[:, None]
    at = own[:, None, :, None].expand(-1, q.shape[1], -1, 1)
    logits.scatter_(3, at, diagonal[..., None]).mul_(call.softmax_scale)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = ~seen[:, None]
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0)


def _products(q: Tensor, keys: Tensor) -> Tensor:
    """Antidiagonal sums ``[B, Hq, g, c]`` of groups ``[B, Hq, g, S, D]`` and ``[B, Hkv, c, S, D]``."""
    batch, heads, count = q.shape[:3]
    left = q.unflatten(1, (keys.shape[1], -1)).flatten(4).flatten(2, 3).flatten(0, 1)
    right = keys.flatten(3).flatten(0, 1).transpose(1, 2)
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        # Tensor cores add in float32; a half-precision result would round the scores for nothing.
        sums = torch.bmm(left, right, out_dtype=torch.float32)
    else:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        sums = torch.bmm(left.to(dtype), right.to(dtype))
    return sums.view(batch, heads, count, -1)


def _own_products(q: Tensor, keys: Tensor, real: Tensor, own: Tensor, half: int) -> Tensor:
    """Sums ``[B, Hq, g]`` of each group with itself, over the causal pairs alone."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    where = own[:, None, :, None, None].expand(-1, keys.shape[1], -1, keys.shape[3] - half, keys.shape[4])
    late = torch.gather(keys[:, :, :, half:], 2, where)
    pairs = (q[..., half:, :].unflatten(1, (keys.shape[1], -1)).to(dtype) * late[:, :, None].to(dtype)).sum(-1)
    sums: Tensor = torch.where(real[:, None, None, :, half:], pairs, 0).sum(-1).flatten(1, 2)
    return sums
