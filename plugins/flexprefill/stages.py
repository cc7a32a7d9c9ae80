"""The estimator of FlexPrefill: both patterns on the device, and a choice per head without asking the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.pooling import key_tile_mean
from sparseprefill.sampling import last_rows, sampled_mass
from sparseprefill.selection import top_mass
from sparseprefill.slashes import slash_tiles

from .config import FlexConfig
from .pattern import distance
from .pooled import query_aware_tiles

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory


@frozen
class FlexEstimator:
    """Algorithms 1 to 4.

    It looks at the call's last queries, so cutting a prompt into chunks changes the estimate: it has no grain.
    """

    config: FlexConfig

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles of every head, and stripes of those that are not query-aware.

        Notes: `distance` ``[B, Hq]``, the Jensen-Shannon distance, and `query_aware`, bool ``[B, Hq]``.
        """
        config, block = self.config, self.config.block
        least = -(-config.min_budget // block)
        most = None if config.max_budget is None else -(-config.max_budget // block)
        rows, real = last_rows(call, block)
        mass = sampled_mass(call, rows, real, block)
        keys = key_tile_mean(call.k, call.geometry, block)
        far = distance(call, keys, rows, real, mass.columns, block)
        aware = far < config.tau
        slashes = top_mass(mass.slashes, config.gamma, least, most)
        tiles = torch.where(
            aware[..., None, None],
            query_aware_tiles(call, keys, config, least, most),
            slash_tiles(call.geometry, slashes, block),
        )
        tiles[..., 0] = True  # the first tile of every row, as the paper's kernels keep it
        columns = top_mass(mass.columns, config.gamma, least * block, None if most is None else most * block)
        mask = SparseMask.from_tiles(call, tiles, block) | _stripes(call, columns & ~aware[..., None], block)
        return Plan(mask, notes={"distance": far, "query_aware": aware})


def _stripes(call: AttentionCall, columns: Tensor, block: int) -> SparseMask:
    """Columns ``[B, Hq, Nkv]`` for every query of the call."""
    group = call.geometry.tile_columns(block)
    return SparseMask.from_stripes(call, columns[:, :, None], group, block, diagonal=False)


def pipeline(config: FlexConfig) -> Pipeline:
    """Build `flexprefill`."""
    return Pipeline(FlexEstimator(config), name="flexprefill")
