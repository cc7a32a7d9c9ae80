"""Rank tiles and columns by the priority that an estimator left in its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.plan import Plan

TOP = torch.finfo(torch.float32).max / 8
"""Scores are clamped to it, which leaves room above for tiles that go before any score, and below for NaN."""
ENTRIES = 1 << 23
"""Scores that are sorted at once, about."""


def tile_worth(plan: Plan, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
    """Finite scores broadcastable to ``[B, Hq, R, C]``: the estimator's, or the nearer to the diagonal the higher."""
    if plan.priority is not None:
        return _finite(plan.priority.tile_scores(call, tile_q, tile_k))
    first = torch.arange(call.geometry.tile_columns(tile_k), device=call.geometry.device) * tile_k
    return first.float()[None, None, None]


def column_worth(plan: Plan, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
    """Finite scores broadcastable to ``[B, h, n, Nkv]``, alike; see `Priority.column_scores` for the arguments."""
    if plan.priority is not None:
        return _finite(plan.priority.column_scores(call, position, heads))
    return torch.arange(call.kv_len, device=call.geometry.device).float()[None, None, None]


def _finite(scores: Tensor) -> Tensor:
    """Scores that can be compared, NaN below all others."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return torch.where(scores.isnan(), -2 * TOP, scores.clamp(-TOP, TOP))


def highest(scores: Tensor, candidates: Tensor, number: Tensor, entries: int = ENTRIES) -> Tensor:
    """bool: of the `candidates` ``[B, Hq, R, C]`` the `number` ``[B, Hq, R]`` of highest score, ties to the nearer.

    Sorts in chunks of query tiles, so that memory stays small.
    """
    batch, heads, rows, columns = candidates.shape
    step = max(1, entries // (batch * heads * columns))
    scores, number = scores.expand(candidates.shape), number.expand(batch, heads, rows)
    parts = zip(scores.split(step, 2), candidates.split(step, 2), number.split(step, 2), strict=True)
    return torch.cat([first_of(descending(*part[:2])[1], part[2], part[1]) for part in parts], 2)


def descending(scores: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in descending order and their index int64, over the last dimension: ties to the later entry.

    What is no candidate comes last, with -inf.
    """
    ordered = torch.where(candidates, scores, -torch.inf).flip(-1)
    values, order = torch.sort(ordered, dim=-1, descending=True, stable=True)
    return values, order.shape[-1] - 1 - order


def first_of(order: Tensor, number: Tensor, candidates: Tensor) -> Tensor:
    """bool like `candidates` ``[..., C]``: those among the first `number` ``[...]`` of an order."""
    chosen = torch.arange(order.shape[-1], device=order.device) < number[..., None]
    return torch.zeros_like(candidates, memory_format=torch.contiguous_format).scatter_(-1, order, chosen) & candidates
