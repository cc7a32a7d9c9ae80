"""Means over query tiles and key tiles on each row's own token grid, and what is worked out from them."""

from __future__ import annotations

import math
from functools import partial

import torch
from attrs import evolve
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.geometry import Geometry
from sparseprefill.memory import Memory


def tile_mean(x: Tensor, geometry: Geometry, tile: int) -> Tensor:
    """Mean of x ``[B, H, Nq, *]`` over the real rows of each query tile: ``[B, H, R, *]``, float32 or better.

    Rows of padding count for nothing, whatever they hold; a tile without a real row gives 0.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if geometry.starts is None and geometry.lengths is None:
        return _whole(x, geometry, tile, dtype)
    return _ragged(x, geometry, tile, dtype)


def _whole(x: Tensor, geometry: Geometry, tile: int, dtype: torch.dtype) -> Tensor:
    """Without padding: whole tiles in one sum over a view, the two that the call may cut apart; no copy of x."""
    front = min(-geometry.q_offset % tile, geometry.q_len)
    back = (geometry.q_len - front) % tile
    whole = (geometry.q_len - front) // tile
    middle = x[:, :, front : geometry.q_len - back].unflatten(2, (whole, tile)).mean(3, dtype=dtype)
    means = [middle]
    if front:
        means.insert(0, x[:, :, :front].sum(2, keepdim=True, dtype=dtype) / front)
    if back:
        means.append(x[:, :, geometry.q_len - back :].sum(2, keepdim=True, dtype=dtype) / back)
    return torch.cat(means, 2) if front or back else middle


def real_rows(geometry: Geometry, tile: int) -> Tensor:
    """int64 ``[B, R]``: query rows of each query tile that are tokens of the call."""
    _, first, last = geometry.token_range()
    low = geometry.tiles(tile) * tile
    return (torch.minimum(low + tile, last[:, None]) - torch.maximum(low, first[:, None])).clamp(min=0)


@uncast
def products(queries: Tensor, keys: Tensor) -> Tensor:
    """``[B, Hq, n, m]``: rows ``[B, Hq, n, w]`` times those of their KV heads, ``[B, Hkv, m, w]``."""
    grouped = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    made: Tensor = (grouped @ keys.transpose(-1, -2)).view(*queries.shape[:3], -1)
    return made


def js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence (log base 2) over the last dimension: from 0 to 1.

    p, q: distributions ``[..., C]``. Entries of zero mass count for nothing, in one or in both.
    """
    tiny = torch.finfo(p.dtype).tiny  # halves and logarithms of denormal numbers are not to be trusted
    p, q = torch.where(p < tiny, 0.0, p), torch.where(q < tiny, 0.0, q)
    both = torch.where(p + q == 0, 1.0, p + q)
    terms = torch.xlogy(p, 2 * p / both) + torch.xlogy(q, 2 * q / both)
    divergence: Tensor = terms.sum(-1) / (2 * math.log(2))
    return divergence.clamp(0.0, 1.0).sqrt()


def key_tile_mean(call: AttentionCall, tile: int, memory: Memory | None = None) -> Tensor:
    """Mean of the call's keys over the real keys of each key tile: ``[B, Hkv, C, D]``, float32 or better.

    Keys after the call's last query count for nothing, as no query may see them; a tile without a key gives 0.
    memory: the request's, which keeps the means for its next chunk; not to be written to then. Plain PyTorch, whose
    sums need not have the same bits in another shape, makes all of them in each call.
    """
    if kernels.serve(call.q) and call.q.dtype != torch.float64:
        from sparseprefill.kernels.statistics.key_means import key_means

        if memory is None:
            return key_means(call, tile)
        return memory.prefix.get(call, ("mean key", tile), tile, partial(key_means, call, tile))
    geometry, k = call.geometry, call.k
    end = geometry.q_offset + geometry.q_len
    keys = evolve(geometry, q_len=end, q_offset=0)
    mean = tile_mean(k[:, :, :end], keys, tile)
    columns = geometry.tile_columns(tile)
    if geometry.starts is None:
        missing = columns - mean.shape[2]
        return functional.pad(mean, [0, 0, 0, missing]) if missing else mean
    # Rows of `mean` begin with the tile of index 0 among the keys, which is padding where the row starts later.
    at = torch.arange(columns, device=k.device) - keys.first_tile(tile)[:, None]
    at = at[:, None, :, None]
    picked = torch.take_along_dim(mean, at.clamp(max=mean.shape[2] - 1), 2)
    return torch.where(at < mean.shape[2], picked, 0)


def _ragged(x: Tensor, geometry: Geometry, tile: int, dtype: torch.dtype) -> Tensor:
    rows, tail = geometry.tile_rows(tile), x.dim() - 3
    position = geometry.first_tile(tile)[:, None] * tile + torch.arange(rows * tile, device=x.device)
    index, real = geometry.locate(position)
    where, keep = (one.view(geometry.batch, 1, -1, *[1] * tail) for one in (index, real))
    picked = torch.where(keep, torch.take_along_dim(x, where, 2), 0)
    total: Tensor = picked.unflatten(2, (rows, tile)).sum(3, dtype=dtype)
    count: Tensor = real.unflatten(1, (rows, tile)).sum(2).clamp(min=1)
    return total / count.view(geometry.batch, 1, rows, *[1] * tail)
