"""The estimator of XAttention: scores of tiles, then the fewest that reach the threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.mask.mask import SparseMask
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.statistics.select import top_mass

from .scores import scores_workspace, tile_scores

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.stages import HeadScope

    from .config import XConfig


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
        """Tiles by score, the row's own tile, and the first."""
        if self.threshold >= 1.0:
            return Plan(SparseMask.full(call, self.block))
        keep = kept_tiles(call, self.stride, self.block, self.threshold)
        if self.sink:
            keep[..., 0] = True
        return Plan(SparseMask.from_tiles(call, keep, self.block))


def kept_tiles(call: AttentionCall, stride: int, block: int, threshold: float) -> Tensor:
    """bool ``[B, Hq, R, C]``: the fewest key tiles of each query tile that reach the threshold."""
    if kernels.serve(call.q):
        from sparseprefill.kernels.groups.launch import supported

        if supported(call, block, stride):
            from . import launch

            return top_mass(launch.tile_scores(call, stride, block), threshold)
    geometry = call.geometry
    shape = (geometry.batch, geometry.heads, geometry.tile_rows(block), geometry.tile_columns(block))
    keep = torch.zeros(shape, dtype=torch.bool, device=geometry.device)
    for rows, scores in tile_scores(call, stride, block):
        keep[:, :, rows, : scores.shape[3]] = top_mass(scores, threshold)
    return keep


def pipeline(config: XConfig) -> Pipeline:
    """Build `xattention`."""
    return Pipeline(
        AntidiagonalEstimator(config.stride, config.threshold, config.block, config.sink), name="xattention"
    )
