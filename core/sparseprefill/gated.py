"""A pipeline behind a gate: calls below break-even run dense attention, and their result says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, fields, frozen

from sparseprefill.breakeven.gate import AUTO, Gate, GateChoice, gate_of
from sparseprefill.executors.dense import dense
from sparseprefill.pipeline import Pipeline

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Result


@frozen(eq=False)
class GatedPipeline(Pipeline):
    """A pipeline that runs sparse only where its gate finds it worth it.

    gate: judges every call by its sizes, under the pipeline's `name`. A dense call meets no stage: estimators and
    observers do not see it, and nothing is remembered of it.
    """

    gate: Gate = field(kw_only=True)
    _plain: Pipeline = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_plain", Pipeline(**_parts(self)))

    @property
    def grain(self) -> int | None:
        """None: another cut gives chunks of other sizes, which the gate may judge otherwise."""
        return None

    def worth(self, call: AttentionCall) -> bool:
        """Whether `run` would run the call sparse. By sizes alone, without waiting for the device."""
        return self.gate.judge(call, self.name).worth

    def run(self, call: AttentionCall, memory: Memory | None = None) -> Result:
        """One layer's attention: see Pipeline. `Result.dense` holds the reason where the call ran dense."""
        verdict = self.gate.judge(call, self.name)
        if verdict.worth:
            return self._plain.run(call, memory)
        return dense(call, self.executor, verdict.reason)

    def ungated(self) -> Pipeline:
        """The pipeline alone."""
        return self._plain


def gated(pipeline: Pipeline, gate: GateChoice = AUTO) -> Pipeline:
    """The pipeline behind a gate: "auto", the path of a table, a BreakEven or Gate; None or False takes a gate away.

    Raises ParameterError for a table that cannot be read. See `breakeven_gate.gate_of` for what "auto" means.
    """
    plain = pipeline.ungated() if isinstance(pipeline, GatedPipeline) else pipeline
    found = gate_of(gate)
    if found is None:
        return plain
    return GatedPipeline(**_parts(plain), gate=found)


def _parts(pipeline: Pipeline) -> dict[str, Any]:
    return {str(one.alias): getattr(pipeline, one.name) for one in fields(Pipeline)}
