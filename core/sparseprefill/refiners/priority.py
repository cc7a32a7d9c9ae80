"""Which tiles matter most, as an estimator may leave it for the budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask.geometry import regrid

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.plan import Plan

NOTE = "tile-priority"
"""Key in `Plan.notes` under which an estimator leaves a TilePriority."""
TOP = torch.finfo(torch.float32).max / 8
"""Scores are clamped to it, which leaves room above for tiles that go before any score."""


@frozen(eq=False)
class TilePriority:
    """Scores of tiles; more is more important.

    scores: float ``[B, Hq, R, C]`` for the query tiles of the call, of `tile_q` tokens, and the key tiles of `tile_k`.
    A tile of another grid takes the score at its first query and first key.
    """

    scores: Tensor
    tile_q: int
    tile_k: int

    def on(self, geometry: Geometry, tile_q: int, tile_k: int) -> Tensor:
        """The scores on another grid."""
        rows = regrid(geometry, self.scores, self.tile_q, tile_q)
        column = torch.arange(geometry.tile_columns(tile_k), device=geometry.device) * tile_k // self.tile_k
        return rows[..., column.clamp(max=rows.shape[3] - 1)]


def priority(plan: Plan, geometry: Geometry, tile_q: int, tile_k: int) -> Tensor:
    """Finite scores broadcastable to ``[B, Hq, R, C]``: the estimator's, or the nearer to the diagonal the higher."""
    left = plan.notes.get(NOTE)
    if isinstance(left, TilePriority):
        scores = left.on(geometry, tile_q, tile_k)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return torch.nan_to_num(scores, nan=0.0).clamp(-TOP, TOP)
    return torch.arange(geometry.tile_columns(tile_k), device=geometry.device, dtype=torch.float32)[None, None, None]


def highest(scores: Tensor, candidates: Tensor, number: Tensor, entries: int = 1 << 23) -> Tensor:
    """bool: of the `candidates` ``[B, Hq, R, C]`` the `number` ``[B, Hq, R]`` of highest score, ties to the nearer.

    Sorts in chunks of query tiles, so that memory stays small.
    """
    batch, heads, rows, columns = candidates.shape
    step = max(1, entries // (batch * heads * columns))
    scores, number = scores.expand(candidates.shape), number.expand(batch, heads, rows)
    parts = zip(scores.split(step, 2), candidates.split(step, 2), number.split(step, 2), strict=True)
    return torch.cat([_highest(*part) for part in parts], 2)


def _highest(scores: Tensor, candidates: Tensor, number: Tensor) -> Tensor:
    ordered = torch.where(candidates, scores, -torch.inf).flip(-1)
    order = torch.sort(ordered, dim=-1, descending=True, stable=True).indices
    chosen = torch.arange(order.shape[-1], device=order.device) < number[..., None]
    picked = torch.zeros_like(candidates, memory_format=torch.contiguous_format).scatter_(-1, order, chosen)
    return picked.flip(-1) & candidates
