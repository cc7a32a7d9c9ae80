"""Algorithm 1: antidiagonal scores of key tiles, a few query tiles at a time.

Queries and keys come in groups of `stride` tokens on each row's own token grid, zeros where there is no token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.statistics.grid import keys_on_grid, queries_on_grid, wide_products

LOGITS = 1 << 25
"""Logits of groups that are in memory at once, over batch and heads."""

PARTIALS = 1 << 27
"""Partial sums that the kernels leave in memory at once, float32, over batch and heads."""

LEAST, PARTS = 16, 8
"""Query tiles of a part at least, and parts of a call: each part looks at the keys up to its own end alone."""


def scores_workspace(call: AttentionCall, stride: int, block: int) -> int:
    """Bytes that the scores of tiles take, with the logits or sums of groups that are in memory on the way."""
    geometry = call.geometry
    pairs = geometry.batch * geometry.heads * geometry.tile_rows(block) * geometry.tile_columns(block)
    return 4 * pairs + 5 * min(PARTIALS, max(4 * LOGITS, 2 * pairs * (block // stride)))


def tile_scores(call: AttentionCall, stride: int, block: int) -> Tensor:
    """``[B, Hq, R, C]``: scores of all key tiles, 0 for those of the future.

    The score of a key tile is the sum, over the query tile's groups, of the softmax over key groups of the mean
    antidiagonal logit: ``scale / stride * sum``, for whole groups. float32 (float64 for float64 calls).
    """
    geometry, per_tile = call.geometry, block // stride
    rows, columns = geometry.tile_rows(block), geometry.tile_columns(block)
    size = max(1, LOGITS // (geometry.batch * geometry.heads * per_tile * per_tile * columns))
    size = min(size, max(LEAST, -(-rows // PARTS)))
    # Keys of a group in reverse order: against queries in theirs, one product over stride * D sums an antidiagonal.
    keys = keys_on_grid(call, columns * block).unflatten(2, (-1, stride)).flip(3)
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    every = torch.zeros(geometry.map_shape(block, block), dtype=dtype, device=geometry.device)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        behind = min(geometry.q_offset // block + last, columns)  # rows that start later stand no further
        tiles = geometry.tiles(block)[:, first:last]
        q = queries_on_grid(call, block, first, last - first)
        _, real = geometry.locate((tiles[..., None] * block + torch.arange(block, device=q.device)).flatten(1))
        groups = (tiles[..., None] * per_tile + torch.arange(per_tile, device=q.device)).flatten(1)
        attention = _group_attention(call, q, real, keys[:, :, : behind * per_tile], groups)
        found = attention.unflatten(3, (-1, per_tile)).sum(4).unflatten(2, (-1, per_tile)).sum(3)
        every[:, :, first:last, :behind] = found
    return every


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
    logits = wide_products(q.flatten(3), keys.flatten(3)).div_(all_rows.clamp(min=1)[:, None, :, None])
    diagonal = _own_products(q, keys, real, own, half) / late_rows.clamp(min=1)[:, None]
    at = own[:, None, :, None].expand(-1, q.shape[1], -1, 1)
    logits.scatter_(3, at, diagonal[..., None]).mul_(call.softmax_scale)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = ~seen[:, None]
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0)


def _own_products(q: Tensor, keys: Tensor, real: Tensor, own: Tensor, half: int) -> Tensor:
    """Sums ``[B, Hq, g]`` of each group with itself, over the causal pairs alone."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    where = own[:, None, :, None, None].expand(-1, keys.shape[1], -1, keys.shape[3] - half, keys.shape[4])
    late = torch.gather(keys[:, :, :, half:], 2, where)
    pairs = (q[..., half:, :].unflatten(1, (keys.shape[1], -1)).to(dtype) * late[:, :, None].to(dtype)).sum(-1)
    sums: Tensor = torch.where(real[:, None, None, :, half:], pairs, 0).sum(-1).flatten(1, 2)
    return sums
