"""UnionEstimator: several estimators as one, whose mask is the union of theirs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Any

import torch
from attrs import evolve, field, frozen

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.errors import ParameterError
from sparseprefill.mask.priority import BestOf
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.stages import HeadScope, Observer, PatternEstimator, common_grain, missing, repeating, widest_scope


def _parts(given: Iterable[Any]) -> tuple[Pipeline, ...]:
    parts: list[Pipeline] = []
    for i, part in enumerate(given):
        if isinstance(part, type) or (not isinstance(part, Pipeline) and missing(part, PatternEstimator)):
            shown = f"{part.__name__}, a class" if isinstance(part, type) else type(part).__name__
            raise ParameterError(f"UnionEstimator part {i} is {shown}: pass an estimator or a Pipeline")
        parts.append(part if isinstance(part, Pipeline) else Pipeline(part, name=type(part).__name__))
        if parts[-1].corrects:
            remedy = "add the corrector to the pipeline around the union"
            raise ParameterError(f"UnionEstimator part {i} has a corrector, which would not run: {remedy}")
    if not parts:
        raise ParameterError("UnionEstimator has no parts: pass at least one estimator or Pipeline")
    return tuple(parts)


@frozen(init=False, eq=False)
class UnionEstimator:
    """Selects whatever any of its parts selects: ``UnionEstimator(first, second, ...)``.

    parts: estimators, or pipelines, of which estimator and refiners run; a pipeline's executor and observers do not
    (give observers to the pipeline that holds the union; correctors too: a part that has one is a ParameterError). No
    pair is computed twice: of the parts that bring a carry the first keeps it, and the masks of all others, with the
    regions of their carries, lose the pairs of its region.
    Tiles are skipped by their logits (`SkipSoftmax`) where all parts would, and by the smallest of their thresholds.
    Probes unite, of priorities the highest scores count; where two parts leave a note of one name, the first's does.
    """

    parts: tuple[Pipeline, ...] = field(converter=_parts)

    def __init__(self, *parts: PatternEstimator | Pipeline) -> None:
        self.__attrs_init__(parts)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def grain(self) -> int | None:
        """The least common multiple of the parts' grains, or None where one has none."""
        return common_grain(part.grain for part in self.parts)

    @property
    def head_scope(self) -> HeadScope | None:
        """The widest of the parts' scopes."""
        return widest_scope(part.plan_scope for part in self.parts)

    @property
    def relies_on(self) -> tuple[Observer, ...]:
        """The observers that its parts rely on."""
        return tuple(one for part in self.parts for one in part.relies_on)

    @property
    def repeats(self) -> bool | str:
        """As far as all parts do."""
        return repeating([part.repeats for part in self.parts])

    @property
    def tail(self) -> int:
        """The longest of the parts' tails."""
        return max(part.tail for part in self.parts)

    def workspace(self, call: AttentionCall) -> int:
        """The parts' plans together, and maps to unite them."""
        plans = sum(part.plan_bound(call) for part in self.parts)
        return plans + (default_workspace(call) if len(self.parts) > 1 else 0)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError where a part was made for another model."""
        for part in self.parts:
            part.check_model(model)

    def unsupported(self, call: AttentionCall) -> str | None:
        """The objections of all parts."""
        reasons = [reason for part in self.parts for reason in part.unsupported_plan(call)]
        return "; ".join(dict.fromkeys(reasons)) or None

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The union of the parts' plans."""
        plans = [part.plan(call, memory) for part in self.parts]
        if len(plans) == 1:
            return plans[0]
        main = next((plan for plan in plans if plan.carry is not None), plans[0])
        others = reduce(or_, (mask for plan in plans if plan is not main for mask in plan.masks))
        probes = [plan.probe for plan in plans if plan.probe is not None]
        scores = tuple(plan.priority for plan in plans if plan.priority is not None)
        below = [plan.skip_below for plan in plans if plan.skip_below is not None]
        return evolve(
            main.widen(others),
            probe=reduce(or_, probes) if probes else None,
            priority=BestOf(scores) if len(scores) > 1 else next(iter(scores), None),
            skip_below=reduce(torch.minimum, below) if len(below) == len(plans) else None,
            notes={name: note for plan in reversed(plans) for name, note in plan.notes.items()},
        )
