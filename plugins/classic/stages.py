"""The estimators: dense and streaming, whose masks depend on positions alone, and vertical-slash."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores, nearness
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace, ranges_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.stages import ALL_ROWS, HeadScope
from sparseprefill.statistics import slashes

from . import DenseConfig, StreamingConfig, VerticalSlashConfig


@frozen
class FullEstimator:
    """Selects every causal key."""

    block: int
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True
    tail: ClassVar[int] = ALL_ROWS

    def workspace(self, call: AttentionCall) -> int:
        """One list for all rows."""
        return ranges_workspace(call, self.block, 0)

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The full mask."""
        return Plan(SparseMask.full(call, self.block))


@frozen
class StreamingEstimator:
    """Selects the first `sink` keys and the nearest `window` keys, in whole tiles (StreamingLLM, section 3)."""

    sink: int
    window: int
    block: int
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True

    def workspace(self, call: AttentionCall) -> int:
        """Lists of one head, for all."""
        return ranges_workspace(call, self.block, self._width(call))

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Two ranges of tiles per query tile; having no scores, it leaves `nearness` as priority."""
        geometry, block = call.geometry, self.block
        near = ((geometry.tiles(block) * block - self.window + 1) // block).clamp(min=0)
        lists = slashes.sinks_and_near(geometry, block, block, -(-self.sink // block), near, self._width(call))
        mask = SparseMask(geometry, block, block, lists)
        return Plan(mask, priority=PriorityScores(tiles=self._nearness, tile_q=block, tile_k=block))

    def _nearness(self, call: AttentionCall) -> Tensor:
        return nearness(call, -(-self.sink // self.block), self.block)

    def _width(self, call: AttentionCall) -> int:
        tiles = -(-self.sink // self.block) + -(-self.window // self.block) + 1
        return min(tiles, call.geometry.tile_columns(self.block))


@frozen
class VerticalSlashEstimator:
    """SharePrefill, Algorithm 5.

    It looks at the call's last queries, so cutting a prompt into chunks changes the estimate: it has no grain.
    """

    gamma: float
    block: int
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and their lists."""
        return default_workspace(call, self.block)

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Columns and diagonals whose mass reaches gamma; their mass is left as priority."""
        return slashes.vertical_slash(call, self.gamma, self.block)


def dense(config: DenseConfig) -> Pipeline:
    """Build `dense`."""
    return Pipeline(FullEstimator(config.block), name="dense")


def streaming(config: StreamingConfig) -> Pipeline:
    """Build `streaming`."""
    return Pipeline(StreamingEstimator(config.sink, config.window, config.block), name="streaming")


def vertical_slash(config: VerticalSlashConfig) -> Pipeline:
    """Build `vertical-slash`."""
    return Pipeline(VerticalSlashEstimator(config.gamma, config.block), name="vertical-slash")
