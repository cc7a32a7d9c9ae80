"""The estimator of XAttention: scores of tiles, then the fewest that reach the threshold."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.stages import HeadScope
from sparseprefill.statistics.grid import supported
from sparseprefill.statistics.select import top_mass

from . import XConfig
from .scores import scores_workspace, tile_scores


@frozen
class AntidiagonalEstimator:
    """Algorithm 1. A query tile's choice depends on its own queries and on keys up to its end."""

    config: XConfig
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True

    @property
    def grain(self) -> int:
        """Cutting a prompt at whole tiles changes nothing."""
        return self.config.block

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles and their lists, and what scoring takes."""
        stride, block = self.config.stride, self.config.block
        return default_workspace(call, block) + scores_workspace(call, stride, block)

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles by score, the row's own tile, and the first; the scores are left as priority."""
        config, block = self.config, self.config.block
        scores = None if config.threshold >= 1.0 else all_scores(call, config.stride, block)
        priority = PriorityScores(tiles=partial(self._shares, scores), tile_q=block, tile_k=block)
        if scores is None:
            return Plan(SparseMask.full(call, block), priority=priority)
        keep = top_mass(scores, config.threshold)
        if config.sink:
            keep[..., 0] = True
        return Plan(SparseMask.from_tiles(call, keep, block), priority=priority)

    def _shares(self, scores: Tensor | None, call: AttentionCall) -> Tensor:
        """Scores as shares of their query tile's: they sum up to its groups."""
        scores = all_scores(call, self.config.stride, self.config.block) if scores is None else scores
        return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def all_scores(call: AttentionCall, stride: int, block: int) -> Tensor:
    """``[B, Hq, R, C]``: scores of all key tiles, 0 for those of the future; see `scores.tile_scores`."""
    if kernels.serve(call.q) and supported(call, block, stride):
        from . import kernels as gpu

        return gpu.tile_scores(call, stride, block)
    return tile_scores(call, stride, block)


def pipeline(config: XConfig) -> Pipeline:
    """Build `xattention`."""
    return Pipeline(AntidiagonalEstimator(config), name="xattention")
