"""A corrector that keeps every law, for the tests of what pipelines do with one, and a registry that offers it."""

from __future__ import annotations

from typing import ClassVar

from attrs import evolve, field, frozen

from helpers.registry_plugins import offering
from sparseprefill.call import AttentionCall
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan, Result
from sparseprefill.registry import Registry
from sparseprefill.stages import HeadScope
from sparseprefill.validate import number


@frozen(kw_only=True)
class Blend:
    """A share of dense attention's output, and the mask's for the rest: at a full mask nothing changes.

    share: of the dense output.
    """

    share: float = field(default=0.5, validator=number(0.0, 1.0))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Result:
        dense = AutoExecutor().execute(call, Plan(SparseMask.full(call))).out
        return evolve(result, out=result.out + self.share * (dense - result.out))


def blending() -> Registry:
    """All that is installed, and the plugin "mine", which offers the corrector "blend"."""
    registry = Registry()
    registry.load_entry_points()
    registry.register(offering("corrector", blend=Blend), "mine")
    return registry
