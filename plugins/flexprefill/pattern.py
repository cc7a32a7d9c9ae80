"""Algorithm 2: which heads pooled queries and keys describe well enough to choose tiles by them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels
from sparseprefill.statistics.divergence import js_distance

from .pooled import products, scores

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall


SQRT_LN2 = math.sqrt(math.log(2))
"""Largest distance in nats. The authors take the divergence by the natural logarithm, core by base 2."""


def distance(call: AttentionCall, keys: Tensor, rows: Tensor, real: Tensor, columns: Tensor, block: int) -> Tensor:
    """Jensen-Shannon distance ``[B, Hq]``, in nats, between estimated and true attention of the sampled queries.

    keys: mean key per tile ``[B, Hkv, C, D]``. rows, real: the sampled queries, index and existence ``[B, n]``.
    columns: their exact attention mass by key ``[B, Hq, Nkv]``.
    """
    missing = keys.shape[2] * block - columns.shape[2]
    padded = functional.pad(columns, [0, missing]) if missing else columns
    true = padded.unflatten(-1, (-1, block)).sum(-1)
    query = _mean_query(call, rows, real, keys.dtype)
    if kernels.serve(true) and true.dtype == torch.float32:
        from . import launch

        return launch.distance(call, products(query, keys)[:, :, 0], true, rows.shape[1], block)
    true = true / true.sum(-1, keepdim=True).clamp(min=torch.finfo(true.dtype).tiny)
    estimate = scores(call, query, keys, _seen(call, rows, real, block)[:, None])
    return js_distance(estimate[:, :, 0], true) * SQRT_LN2


def _mean_query(call: AttentionCall, rows: Tensor, real: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, Hq, 1, D]``: of the sampled queries."""
    if call.starts is None and call.lengths is None:
        return call.q[:, :, -rows.shape[1] :].mean(2, keepdim=True, dtype=dtype)
    where = rows[:, None, :, None].expand(-1, call.q.shape[1], -1, call.q.shape[3])
    picked = torch.where(real[:, None, :, None], torch.gather(call.q, 2, where), 0)
    total: Tensor = picked.sum(2, keepdim=True, dtype=dtype)
    return total / real.sum(1).clamp(min=1)[:, None, None, None]


def _seen(call: AttentionCall, rows: Tensor, real: Tensor, block: int) -> Tensor:
    """bool ``[B, C]``: tiles with a key that any of the sampled queries may see."""
    geometry = call.geometry
    position = torch.gather(geometry.query_positions(), 1, rows)
    last = torch.where(real, position, -1).amax(1, keepdim=True)
    first = torch.arange(geometry.tile_columns(block), device=geometry.device) * block
    seen = first <= last
    if geometry.window is None:
        return seen
    nearest = torch.where(real, position, geometry.kv_len).amin(1, keepdim=True)
    return seen & (first + block - 1 > nearest - geometry.window)
