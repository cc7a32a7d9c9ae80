"""The estimator: tiles in which a sampled row gives a key enough of its softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan

from .maxima import LOGITS, weights

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.stages import HeadScope

    from .config import RowMaxConfig


@frozen
class RowMaxEstimator:
    """Keeps a key tile if any sampled row of the query tile gives any of its keys `eps` of its softmax or more.

    A query tile's choice depends on its own queries and on keys up to its end.
    """

    eps: float
    every: int
    block: int
    sink: bool
    head_scope: ClassVar[HeadScope] = "head"

    @property
    def grain(self) -> int:
        """Cutting a prompt at whole tiles changes nothing."""
        return self.block

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles and their lists, the weights of tiles, and the logits that are in memory on the way."""
        geometry = call.geometry
        pairs = geometry.batch * geometry.heads * geometry.tile_rows(self.block) * geometry.tile_columns(self.block)
        return default_workspace(call, self.block) + 4 * pairs + 8 * LOGITS

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles by weight, the row's own tile, and the first; the weights are left as priority."""
        if self.eps <= 0.0:
            return Plan(SparseMask.full(call, self.block), priority=self._priority(self._weights))
        found = self._weights(call)
        keep = found >= self.eps
        if self.sink:
            keep[..., 0] = True
        plan = SparseMask.from_tiles(call, keep, self.block)
        return Plan(plan, priority=self._priority(partial(_known, found)))

    def _priority(self, tiles: Callable[[AttentionCall], Tensor]) -> PriorityScores:
        return PriorityScores(tiles=tiles, tile_q=self.block, tile_k=self.block)

    def _weights(self, call: AttentionCall) -> Tensor:
        """``[B, Hq, R, C]``: the largest weight of any sampled row in each key tile; 0 for those of the future."""
        geometry = call.geometry
        dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        shape = (geometry.batch, geometry.heads, geometry.tile_rows(self.block), geometry.tile_columns(self.block))
        every = torch.zeros(shape, dtype=dtype, device=geometry.device)
        for rows, found in weights(call, self.block, self.every):
            every[:, :, rows, : found.shape[3]] = found
        return every


def _known(found: Tensor, call: AttentionCall) -> Tensor:
    return found


def pipeline(config: RowMaxConfig) -> Pipeline:
    """Build `rowmax`."""
    return Pipeline(RowMaxEstimator(config.eps, config.every, config.block, config.sink), name="rowmax")
