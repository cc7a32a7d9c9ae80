"""The estimator of XAttention: scores of tiles, then the fewest that reach the threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from sparseprefill.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.selection import top_mass

from .scores import tile_scores

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory

    from .config import XConfig


@frozen
class AntidiagonalEstimator:
    """Algorithm 1. A query tile's choice depends on its own queries and on keys up to its end."""

    stride: int
    threshold: float
    block: int
    sink: bool

    @property
    def grain(self) -> int:
        """Cutting a prompt at whole tiles changes nothing."""
        return self.block

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles by score, the row's own tile, and the first."""
        geometry, block = call.geometry, self.block
        shape = (geometry.batch, geometry.heads, geometry.tile_rows(block), geometry.tile_columns(block))
        if self.threshold >= 1.0:
            return Plan(SparseMask.full(call, block))
        keep = torch.zeros(shape, dtype=torch.bool, device=geometry.device)
        for rows, scores in tile_scores(call, self.stride, block):
            keep[:, :, rows, : scores.shape[3]] = top_mass(scores, self.threshold)
        if self.sink:
            keep[..., 0] = True
        return Plan(SparseMask.from_tiles(call, keep, block))


def pipeline(config: XConfig) -> Pipeline:
    """Build `xattention`."""
    return Pipeline(
        AntidiagonalEstimator(config.stride, config.threshold, config.block, config.sink), name="xattention"
    )
