"""Small stages, by shape alone, for the tests of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from sparseprefill.call import AttentionCall
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan, Result


@frozen
class Estimate:
    """An estimator made of a function."""

    answer: Callable[[AttentionCall, Memory], Any] = lambda call, _: Plan(SparseMask.full(call, 16))
    grain: int | None = None
    objection: str | None = None

    def estimate(self, call: AttentionCall, memory: Memory) -> Any:
        return self.answer(call, memory)

    def unsupported(self, call: AttentionCall) -> str | None:
        return self.objection


@frozen
class Refine:
    """A refiner made of a function."""

    answer: Callable[[AttentionCall, Plan, Memory], Any] = lambda call, plan, _: plan
    grain: int | None = None

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Any:
        return self.answer(call, plan, memory)


@frozen
class Observe:
    """An observer made of a function."""

    answer: Callable[[AttentionCall, Plan, Result, Memory], Any] = lambda *_: None

    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> Any:
        return self.answer(call, plan, result, memory)
