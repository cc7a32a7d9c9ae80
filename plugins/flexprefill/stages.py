"""The estimator of FlexPrefill: both patterns on the device, and a choice per head without asking the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import frozen

from sparseprefill.mask.priority import Priority, PriorityScores
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.statistics.pooled import key_tile_mean
from sparseprefill.statistics.sampled import last_rows, sampled_mass
from sparseprefill.statistics.select import top_mass
from sparseprefill.statistics.slashes import SampledPriority, columns_and_diagonals, slash_tiles

from . import FlexConfig
from .pooled import distance, query_aware_tiles, tile_scores

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.stages import HeadScope


@frozen
class FlexEstimator:
    """Algorithms 1 to 4.

    It looks at the call's last queries, so cutting a prompt into chunks changes the estimate: it has no grain.
    """

    config: FlexConfig
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and their lists."""
        return default_workspace(call, self.config.block)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles of every head, and stripes of those that are not query-aware.

        Their scores are left as priority. Notes: `distance` ``[B, Hq]``, the Jensen-Shannon distance in nats, and
        `query_aware`, bool ``[B, Hq]``.
        """
        config, block = self.config, self.config.block
        least = -(-config.min_budget // block)
        most = None if config.max_budget is None else -(-config.max_budget // block)
        rows, real = last_rows(call, block)
        mass = sampled_mass(call, rows, real, block)
        keys = key_tile_mean(call, block, memory)
        far = distance(call, keys, rows, real, mass.columns, block)
        aware = far < config.tau
        slashes = top_mass(mass.slashes, config.gamma, least, most)
        columns = top_mass(mass.columns, config.gamma, least * block, None if most is None else most * block)
        queries = query_aware_tiles(call, keys, config, least, most)
        tiles = slash_tiles(call.geometry, slashes, block, exclude=(aware, queries))
        # The first tile of every row too, as the paper's kernels keep it.
        mask = columns_and_diagonals(call, tiles, columns, block, exclude=aware, sink=1)
        priority = FlexPriority(aware, SampledPriority(mass, real, block), config)
        return Plan(mask, priority=priority, notes={"distance": far, "query_aware": aware})


@frozen(eq=False)
class FlexPriority(Priority):
    """Shares of the sampled attention, and of pooled attention for the tiles of query-aware heads.

    aware: bool ``[B, Hq]``. The pooled scores are made again where somebody asks for them.
    """

    aware: Tensor
    sampled: SampledPriority
    config: FlexConfig

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        block = self.config.block
        pooled = PriorityScores(tiles=self._pooled, tile_q=block, tile_k=block).tile_scores(call, tile_q, tile_k)
        return torch.where(self.aware[..., None, None], pooled, self.sampled.tile_scores(call, tile_q, tile_k))

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        return self.sampled.column_scores(call, position, heads)

    def _pooled(self, call: AttentionCall) -> Tensor:
        return tile_scores(call, key_tile_mean(call, self.config.block), self.config.block)


def pipeline(config: FlexConfig) -> Pipeline:
    """Build `flexprefill`."""
    return Pipeline(FlexEstimator(config), name="flexprefill")
