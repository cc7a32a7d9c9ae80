"""Algorithms 2 and 4: tiles by the attention of mean queries to mean keys, and the heads that this describes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.mask.geometry import reachable_map
from sparseprefill.statistics.divergence import js_distance
from sparseprefill.statistics.pooled import products, real_rows, tile_mean
from sparseprefill.statistics.sampled import by_block, seen_blocks
from sparseprefill.statistics.select import top_mass

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

    from . import FlexConfig

SCORES = 1 << 23
"""Scores that are sorted at once, over batch and heads."""
AT_ONCE = 1 << 26
"""Scores in memory at once where nothing is sorted."""
SQRT_LN2 = math.sqrt(math.log(2))
"""Largest distance in nats. The authors take the divergence by the natural logarithm, core by base 2."""


def distance(call: AttentionCall, keys: Tensor, rows: Tensor, real: Tensor, columns: Tensor, block: int) -> Tensor:
    """Jensen-Shannon distance ``[B, Hq]``, in nats, between estimated and true attention of the sampled queries.

    keys: mean key per tile ``[B, Hkv, C, D]``. rows, real: the sampled queries, index and existence ``[B, n]``.
    columns: their exact attention mass by key ``[B, Hq, Nkv]``.
    """
    true = by_block(columns, block)
    query = _mean_query(call, rows, real, keys.dtype)
    if kernels.serve(true) and true.dtype == torch.float32:
        from . import launch

        return launch.distance(call, products(query, keys)[:, :, 0], true, rows.shape[1], block)
    true = true / true.sum(-1, keepdim=True).clamp(min=torch.finfo(true.dtype).tiny)
    estimate = scores(call, query, keys, seen_blocks(call.geometry, rows, real, block)[:, None])
    return js_distance(estimate[:, :, 0], true) * SQRT_LN2


def _mean_query(call: AttentionCall, rows: Tensor, real: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, Hq, 1, D]``: of the sampled queries."""
    if call.starts is None and call.lengths is None:
        return call.q[:, :, -rows.shape[1] :].mean(2, keepdim=True, dtype=dtype)
    where = rows[:, None, :, None].expand(-1, call.q.shape[1], -1, call.q.shape[3])
    picked = torch.where(real[:, None, :, None], torch.gather(call.q, 2, where), 0)
    total: Tensor = picked.sum(2, keepdim=True, dtype=dtype)
    return total / real.sum(1).clamp(min=1)[:, None, None, None]


def scores(call: AttentionCall, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Softmax ``[B, Hq, r, C]`` of mean queries ``[B, Hq, r, D]`` over the mean keys ``[B, Hkv, C, D]`` that are seen.

    seen: bool ``[B, r, C]``. A row that sees nothing has scores of 0.
    """
    logits = products(queries * call.softmax_scale, keys)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = ~seen[:, None]
    attention: Tensor = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
    return attention.masked_fill_(hidden, 0.0)


def tile_scores(call: AttentionCall, keys: Tensor, block: int) -> Tensor:
    """``[B, Hq, R, C]``: the scores of all query tiles, in plain PyTorch on any device."""
    geometry = call.geometry
    queries, seen = tile_mean(call.q, geometry, block), reachable_map(geometry, block, block)
    size = max(1, AT_ONCE // (geometry.batch * geometry.heads * keys.shape[2]))
    parts = zip(queries.split(size, 2), seen.split(size, 1), strict=True)
    return torch.cat([scores(call, q, keys, s) for q, s in parts], 2)


def query_aware_tiles(call: AttentionCall, keys: Tensor, config: FlexConfig, least: int, most: int | None) -> Tensor:
    """bool ``[B, Hq, R, C]``: the fewest tiles that reach gamma, between `least` and `most` per query tile."""
    geometry, block = call.geometry, config.block
    queries = tile_mean(call.q, geometry, block)
    if kernels.serve(queries) and queries.dtype == torch.float32 and config.coverage == "row":
        return _by_kernel(call, queries, keys, config, least, most)
    seen = reachable_map(geometry, block, block)
    if geometry.starts is not None or geometry.lengths is not None:
        seen = seen & (real_rows(geometry, block) > 0)[..., None]
    if config.coverage == "global":
        every = scores(call, queries, keys, seen)
        keep = top_mass(every.flatten(2), config.gamma).view(every.shape) | top_mass(every, 0.0, least)
        return keep if most is None else keep & top_mass(every, 1.0, most=most)
    size = max(1, SCORES // (geometry.batch * geometry.heads * keys.shape[2]))
    parts = zip(queries.split(size, 2), seen.split(size, 1), strict=True)
    return torch.cat([top_mass(scores(call, q, keys, s), config.gamma, least, most) for q, s in parts], 2)


def _by_kernel(
    call: AttentionCall, queries: Tensor, keys: Tensor, config: FlexConfig, least: int, most: int | None
) -> Tensor:
    from .launch import tile_softmax

    size = max(1, AT_ONCE // (queries.shape[0] * queries.shape[1] * keys.shape[2]))
    found, first = [], 0
    for part in queries.split(size, 2):
        every = tile_softmax(call, products(part, keys), first, config.block)
        found.append(top_mass(every, config.gamma, least, most))
        first += part.shape[2]
    return found[0] if len(found) == 1 else torch.cat(found, 2)
