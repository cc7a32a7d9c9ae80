"""Algorithm 4: tiles by the attention of mean queries to mean keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.mask.geometry import reachable_map
from sparseprefill.statistics.pooled import tile_mean
from sparseprefill.statistics.select import top_mass

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

    from . import FlexConfig

SCORES = 1 << 23
"""Scores that are sorted at once, over batch and heads."""
AT_ONCE = 1 << 26
"""Scores in memory at once where nothing is sorted."""


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """``[B, Hq, r, C]``: mean queries ``[B, Hq, r, D]`` times the mean keys ``[B, Hkv, C, D]`` of their group."""
    grouped = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    made: Tensor = (grouped @ keys.transpose(-1, -2)).view(*queries.shape[:3], -1)
    return made


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
        real = tile_mean(geometry.real_queries()[:, None].to(queries.dtype), geometry, block)[:, 0] > 0
        seen = seen & real[..., None]
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
