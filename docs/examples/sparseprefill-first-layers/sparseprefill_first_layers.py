"""The plugin: a refiner, and the hook that offers it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from sparseprefill import AttentionCall, HeadScope, MaskRefiner, Memory, Plan, SparseMask, hookimpl
from sparseprefill.validate import whole


@frozen
class FirstLayers:
    """Gives the first layers every key.

    layers: so many layers get every key.
    """

    layers: int = field(default=2, validator=whole(0))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds everything that is missing in those layers."""
        if call.layer >= self.layers:
            return plan
        return plan.widen(SparseMask.full(call, plan.grid()))


@hookimpl
def sparseprefill_refiners() -> Mapping[str, type[MaskRefiner]]:
    """The refiners of this package, by the names that configurations give them."""
    return {"first-layers": FirstLayers}
