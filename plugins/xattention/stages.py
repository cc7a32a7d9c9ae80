"""The estimator of XAttention: scores of tiles, then the fewest that reach the threshold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.statistics.select import top_mass

from .scores import scores_workspace, tile_scores

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.stages import HeadScope

    from . import XConfig


@frozen
class AntidiagonalEstimator:
    """Algorithm 1. A query tile's choice depends on its own queries and on keys up to its end."""

    stride: int
    threshold: float
    block: int
    sink: bool
    head_scope: ClassVar[HeadScope] = "head"

    @property
    def grain(self) -> int:
        """Cutting a prompt at whole tiles changes nothing."""
        return self.block

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles and their lists, and what scoring takes."""
        return default_workspace(call, self.block) + scores_workspace(call, self.stride, self.block)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles by score, the row's own tile, and the first; the scores are left as priority."""
        if self.threshold >= 1.0:
            return Plan(SparseMask.full(call, self.block), priority=self._priority(partial(self._shares, None)))
        scores = all_scores(call, self.stride, self.block)
        keep = top_mass(scores, self.threshold)
        if self.sink:
            keep[..., 0] = True
        return Plan(
            SparseMask.from_tiles(call, keep, self.block), priority=self._priority(partial(self._shares, scores))
        )

    def _priority(self, tiles: Callable[[AttentionCall], Tensor]) -> PriorityScores:
        return PriorityScores(tiles=tiles, tile_q=self.block, tile_k=self.block)

    def _shares(self, scores: Tensor | None, call: AttentionCall) -> Tensor:
        """Scores as shares of their query tile's: they sum up to its groups."""
        scores = all_scores(call, self.stride, self.block) if scores is None else scores
        return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def all_scores(call: AttentionCall, stride: int, block: int) -> Tensor:
    """``[B, Hq, R, C]``: scores of all key tiles, 0 for those of the future; see `scores.tile_scores`."""
    if kernels.serve(call.q):
        from sparseprefill.kernels.groups.launch import supported

        if supported(call, block, stride):
            from . import launch

            return launch.tile_scores(call, stride, block)
    geometry = call.geometry
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    shape = (geometry.batch, geometry.heads, geometry.tile_rows(block), geometry.tile_columns(block))
    every = torch.zeros(shape, dtype=dtype, device=geometry.device)
    for rows, scores in tile_scores(call, stride, block):
        every[:, :, rows, : scores.shape[3]] = scores
    return every


def pipeline(config: XConfig) -> Pipeline:
    """Build `xattention`."""
    return Pipeline(
        AntidiagonalEstimator(config.stride, config.threshold, config.block, config.sink), name="xattention"
    )
