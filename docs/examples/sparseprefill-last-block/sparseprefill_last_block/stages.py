"""The estimator: exact attention of the last block of queries says which columns matter."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import frozen

from sparseprefill import AttentionCall, HeadScope, Memory, Pipeline, Plan, SparseMask
from sparseprefill.statistics.sampled import last_rows, sampled_mass

from .config import LastBlockConfig


@frozen
class LastBlockEstimator:
    """Top columns as stripes, and a band of tiles.

    It looks at the call's last queries, so cutting a prompt into chunks changes the estimate: it has no `grain`.
    """

    keep: int
    band: int
    block: int
    head_scope: ClassVar[HeadScope] = "head"

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The union of both parts."""
        return Plan(self._band(call) | self._columns(call))

    def _columns(self, call: AttentionCall) -> SparseMask:
        rows, real = last_rows(call, self.block)  # [B, n]
        mass = sampled_mass(call, rows, real, self.block).columns  # [B, Hq, Nkv]
        order = mass.argsort(dim=-1, descending=True, stable=True)[..., : self.keep]  # [B, Hq, keep]
        chosen = torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, order, True)
        group = call.geometry.tile_columns(self.block)  # one group: every query tile shares the columns
        return SparseMask.from_stripes(call, chosen[:, :, None], group, self.block, diagonal=False)  # [B, Hq, 1, Nkv]

    def _band(self, call: AttentionCall) -> SparseMask:
        geometry, width = call.geometry, -(-(self.band - 1) // self.block) + 1
        tile = geometry.tiles(self.block)  # [B, R]: each query tile's place on the grid, -1 where there is none
        last = torch.where(tile >= 0, tile + 1, 0).clamp(max=geometry.tile_columns(self.block))
        first = (tile + 1 - width).clamp(min=0)
        return SparseMask.from_ranges(call, first[..., None], last[..., None], width, self.block)  # [B, R, 1]


def pipeline(config: LastBlockConfig) -> Pipeline:
    """Build `last-block`."""
    return Pipeline(LastBlockEstimator(config.keep, config.band, config.block), name="last-block")
