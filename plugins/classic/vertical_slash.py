"""Vertical-slash: columns as stripes, diagonals as tiles, chosen from the last queries' exact attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.lists import IndexLists
from sparseprefill.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.sampling import last_rows, sampled_mass
from sparseprefill.selection import top_mass

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.geometry import Geometry
    from sparseprefill.memory import Memory

    from .config import VerticalSlashConfig


@frozen
class VerticalSlashEstimator:
    """SharePrefill, Algorithm 5, with the last block of queries as the sample.

    A diagonal bin s holds distances ``[s * block, (s + 1) * block)``, whose pairs fall in the tile diagonals s and
    s + 1: both are kept. The diagonal tile is kept always. It looks at the call's last queries, so cutting a prompt
    into chunks changes the estimate: it has no grain.
    """

    gamma: float
    block: int

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Columns and diagonals whose mass reaches gamma."""
        geometry, block = call.geometry, self.block
        rows, real = last_rows(call, block)
        mass = sampled_mass(call, rows, real, block)
        columns, slashes = top_mass(mass.columns, self.gamma), top_mass(mass.slashes, self.gamma)
        group = geometry.tile_columns(block)
        groups = geometry.tile_rows(group * block)
        stripes = IndexLists.from_map(columns[:, :, None].expand(-1, -1, groups, -1))
        tiles = SparseMask.from_tiles(call, diagonals(geometry, slashes, block), block)
        return Plan(SparseMask(geometry, block, block, tiles.tiles, group, stripes))


def diagonals(geometry: Geometry, slashes: Tensor, block: int) -> Tensor:
    """bool ``[B, H, R, C]``: tiles on the diagonals of bins ``[B, H, S]``, both that a bin's pairs fall in."""
    column = torch.arange(geometry.tile_columns(block), device=geometry.device)
    lag = geometry.tiles(block)[..., None] - column
    keep = torch.zeros(*slashes.shape[:2], slashes.shape[2] + 2, dtype=torch.bool, device=slashes.device)
    keep[..., 0], keep[..., 1:-1] = True, slashes
    keep[..., 2:] |= slashes
    where = torch.where((lag >= 0) & (lag <= slashes.shape[2]), lag + 1, 0)[:, None]
    at = where.expand(-1, slashes.shape[1], -1, -1).flatten(2)
    return torch.gather(keep, 2, at).view(*slashes.shape[:2], *lag.shape[1:]) & (lag >= 0)[:, None]


def pipeline(config: VerticalSlashConfig) -> Pipeline:
    """Build `vertical-slash`."""
    return Pipeline(VerticalSlashEstimator(config.gamma, config.block), name="vertical-slash")
