"""Algorithm 4: tiles by the attention of mean queries to mean keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill.mask_math import reachable_map
from sparseprefill.pooling import tile_mean
from sparseprefill.selection import top_mass

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

    from .config import FlexConfig

SCORES = 1 << 23
"""Scores that are sorted at once, over batch and heads."""


def scores(call: AttentionCall, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Softmax ``[B, Hq, r, C]`` of mean queries ``[B, Hq, r, D]`` over the mean keys ``[B, Hkv, C, D]`` that are seen.

    seen: bool ``[B, r, C]``. A row that sees nothing has scores of 0.
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
    logits = (grouped @ keys.transpose(-1, -2) * call.softmax_scale).view(*queries.shape[:3], -1)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = ~seen[:, None]
    attention: Tensor = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
    return attention.masked_fill_(hidden, 0.0)


def query_aware_tiles(call: AttentionCall, keys: Tensor, config: FlexConfig, least: int, most: int | None) -> Tensor:
    """bool ``[B, Hq, R, C]``: the fewest tiles that reach gamma, between `least` and `most` per query tile."""
    geometry, block = call.geometry, config.block
    queries = tile_mean(call.q, geometry, block)
    real = tile_mean(geometry.real_queries()[:, None].to(queries.dtype), geometry, block)[:, 0] > 0
    seen = reachable_map(geometry, block, block) & real[..., None]
    if config.coverage == "global":
        every = scores(call, queries, keys, seen)
        keep = top_mass(every.flatten(2), config.gamma).view(every.shape) | top_mass(every, 0.0, least)
        return keep if most is None else keep & top_mass(every, 1.0, most=most)
    size = max(1, SCORES // (geometry.batch * geometry.heads * keys.shape[2]))
    parts = zip(queries.split(size, 2), seen.split(size, 1), strict=True)
    return torch.cat([top_mass(scores(call, q, keys, s), config.gamma, least, most) for q, s in parts], 2)
