"""Skip-softmax is a full mask and an option of execution."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from sparseprefill.call import AttentionCall
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import ranges_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.refiners.skip import SkipSoftmax
from sparseprefill.stages import HeadScope

from . import SkipSoftmaxConfig


@frozen
class EveryTile:
    """Selects every causal key: the executor decides tile by tile what is finished."""

    block: int
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True

    def workspace(self, call: AttentionCall) -> int:
        """One list for all rows."""
        return ranges_workspace(call, self.block, 0)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The full mask."""
        return Plan(SparseMask.full(call, self.block))


def pipeline(config: SkipSoftmaxConfig) -> Pipeline:
    """Build `skip-softmax`."""
    skip = SkipSoftmax(config.skip_below, grain=config.block)
    return Pipeline(EveryTile(config.block), (skip,), name="skip-softmax")
