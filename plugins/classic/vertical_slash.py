"""Vertical-slash: columns as stripes, diagonals as tiles, chosen from the last queries' exact attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.statistics.slashes import vertical_slash

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Plan
    from sparseprefill.stages import HeadScope

    from .config import VerticalSlashConfig


@frozen
class VerticalSlashEstimator:
    """SharePrefill, Algorithm 5.

    It looks at the call's last queries, so cutting a prompt into chunks changes the estimate: it has no grain.
    """

    gamma: float
    block: int
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and their lists."""
        return default_workspace(call, self.block)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Columns and diagonals whose mass reaches gamma; their mass is left as priority."""
        return vertical_slash(call, self.gamma, self.block)


def pipeline(config: VerticalSlashConfig) -> Pipeline:
    """Build `vertical-slash`."""
    return Pipeline(VerticalSlashEstimator(config.gamma, config.block), name="vertical-slash")
