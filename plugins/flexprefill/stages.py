"""The estimator of FlexPrefill: both patterns on the device, and a choice per head without asking the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.statistics.pooled import key_tile_mean
from sparseprefill.statistics.sampled import last_rows, sampled_mass
from sparseprefill.statistics.select import top_mass
from sparseprefill.statistics.slashes import columns_and_diagonals, slash_tiles

from .config import FlexConfig
from .pattern import distance
from .pooled import query_aware_tiles

if TYPE_CHECKING:
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

        Notes: `distance` ``[B, Hq]``, the Jensen-Shannon distance in nats, and `query_aware`, bool ``[B, Hq]``.
        """
        config, block = self.config, self.config.block
        least = -(-config.min_budget // block)
        most = None if config.max_budget is None else -(-config.max_budget // block)
        rows, real = last_rows(call, block)
        mass = sampled_mass(call, rows, real, block)
        keys = key_tile_mean(call, block)
        far = distance(call, keys, rows, real, mass.columns, block)
        aware = far < config.tau
        slashes = top_mass(mass.slashes, config.gamma, least, most)
        columns = top_mass(mass.columns, config.gamma, least * block, None if most is None else most * block)
        queries = query_aware_tiles(call, keys, config, least, most)
        tiles = slash_tiles(call.geometry, slashes, block, exclude=(aware, queries))
        # The first tile of every row too, as the paper's kernels keep it.
        mask = columns_and_diagonals(call, tiles, columns, block, exclude=aware, sink=1)
        return Plan(mask, notes={"distance": far, "query_aware": aware})


def pipeline(config: FlexConfig) -> Pipeline:
    """Build `flexprefill`."""
    return Pipeline(FlexEstimator(config), name="flexprefill")
