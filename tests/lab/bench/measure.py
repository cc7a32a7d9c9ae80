"""Measures cases: a call's time next to dense attention, and what was kept of the attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen

from sparseprefill.call import AttentionCall
from sparseprefill.errors import SparsePrefillError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.memory import Memory
from sparseprefill.metrics import lowest_rows, recall
from sparseprefill.parts.split import parts
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result
from sparseprefill.route import Route, gated

from .case import Case, call_of, in_pages, random_mask
from .clock import Clock
from .dense import Baseline, baseline
from .shape import Shape

ROWS = 64
"""Query rows on which recall is sampled."""
Dense = Callable[[AttentionCall, Sequence[int]], Baseline]
"""Gives dense attention for a call and the lengths of its batch rows."""
Inputs = Callable[[Shape, str, int, torch.device], AttentionCall]
"""Gives the call of a shape, a kind of inputs, a seed and a device."""


@frozen(kw_only=True)
class Row:
    """What was measured of a case, seconds by the device's clock; of several layers the mean over them.

    baseline: name of the dense kernel. estimate: seconds until the mask is there, of `seconds`. recall, lowest: share
    of the attention mass kept, mean over heads and sampled rows, and of the head that keeps least. row_p1, row_lowest:
    the 1st percentile and the lowest of these rows, of all heads and layers. extra: most bytes held beyond inputs and
    result, on GPUs. parts: that a long call ran in. note: why it ran dense. error: what stopped it.
    """

    case: Case
    seconds: float = 0.0
    dense: float = 0.0
    baseline: str = ""
    density: float = 1.0
    estimate: float | None = None
    recall: float | None = None
    lowest: float | None = None
    row_p1: float | None = None
    row_lowest: float | None = None
    extra: int | None = None
    parts: int = 1
    note: str = ""
    error: str = ""

    @property
    def speedup(self) -> float:
        """Dense time over time."""
        return self.dense / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Density times speed-up: 1 where a pair costs as much as in the dense kernel."""
        return self.density * self.speedup


@frozen(eq=False, kw_only=True)
class Ready:
    """A case with its tensors on the device.

    calls: one for each layer. layer: runs one of them. planned: all of it but the executor, by index; None for masks.
    dense: the yardstick.
    """

    case: Case
    calls: Sequence[AttentionCall]
    layer: Callable[[AttentionCall], Result]
    planned: Callable[[int], Any] | None
    dense: Baseline

    def run(self) -> Result:
        """Layer after layer, as in a prefill; the last one's result."""
        for call in self.calls[:-1]:
            self.layer(call)
        return self.layer(self.calls[-1])

    @property
    def plan(self) -> Callable[[], Any] | None:
        """Plans layer after layer, without the executor; None for masks."""
        planned = self.planned
        return None if planned is None else lambda: [planned(index) for index in range(len(self.calls))]

    def row(self, seconds: float, dense: float, **more: Any) -> Row:
        """The row of a table; runs each layer once more, for density, recall and memory."""
        found = [self._facts(call) for call in self.calls]
        extras = [one["extra"] for one in found if one["extra"] is not None]
        facts: dict[str, Any] = {"note": found[0]["note"], "parts": max(one["parts"] for one in found)}
        facts |= {"density": _mean(found, "density"), "extra": max(extras, default=None)}
        if self.planned is not None:
            facts |= {"recall": _mean(found, "recall"), "lowest": min(one["lowest"] for one in found)}
            rows = lowest_rows(torch.stack([one["kept"] for one in found]))
            facts |= dict(zip(("row_p1", "row_lowest"), map(float, rows), strict=True))
        return Row(case=self.case, seconds=seconds, dense=dense, baseline=self.dense.kernel, **facts, **more)

    def _facts(self, call: AttentionCall) -> dict[str, Any]:
        """Density, memory and recall of one layer, whose result is let go."""
        result, extra = self._once(call)
        facts: dict[str, Any] = {"density": result.density, "extra": extra, "note": result.dense}
        facts["parts"] = 1 if result.parts is None else result.parts.count
        if self.planned is not None:
            kept = recall(call, result, rows=ROWS)
            heads = kept.nanmean(-1)
            facts |= {"recall": float(heads.mean()), "lowest": float(heads.min()), "kept": kept}
        return facts

    def _once(self, call: AttentionCall) -> tuple[Result, int | None]:
        device = call.q.device
        if device.type != "cuda":
            return self.layer(call), None
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = self.layer(call)
        torch.cuda.synchronize(device)
        held = sum(x.numel() * x.element_size() for x in (result.out, result.lse))
        return result, torch.cuda.max_memory_allocated(device) - before - held


def _mean(found: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(one[name] for one in found)) / len(found)


def prepare(
    case: Case, device: torch.device, seed: int = 0, dense: Dense = baseline, inputs: Inputs = call_of
) -> Ready:
    """Make inputs, mask and yardstick. Raises ParameterError for what cannot be."""
    call = inputs(case.shape, case.input, seed, device)
    beside = dense(call, case.shape.lengths)  # on tensors, whatever the call reads
    if case.shape.page:
        call = in_pages(call, case.shape.page, seed)
    if case.pipeline is None:
        plan, executor = Plan(random_mask(call, case.mask, seed)), AutoExecutor(precision=case.precision)
        run = lambda one: executor.execute(uncopied(one), plan)  # noqa: E731
        return Ready(case=case, calls=[call], layer=run, planned=None, dense=beside)
    plain = gated(case.pipeline, None)
    pipeline = gated(plain) if case.gate else plain
    # Of one prefill: what a method remembers of its first layer is there in the layers behind it, and so here.
    memory = Memory()
    calls = [evolve(call, layer=layer) for layer in range(case.layers)]
    before = [memory] if len(calls) == 1 else memories(pipeline, calls)  # as each layer of a prefill finds it
    return Ready(
        case=case,
        calls=calls,
        layer=lambda one: pipeline.run(uncopied(one), memory),
        planned=lambda index: plan_only(plain, uncopied(calls[index]), before[index]),
        dense=beside,
    )


def uncopied(call: AttentionCall) -> AttentionCall:
    """The call as a server makes it anew: what was copied of its pages is forgotten."""
    if call.pages is None:
        return call
    pages = evolve(call.pages)
    return evolve(call, k=pages, v=pages)


def memories(pipeline: Pipeline | Route, calls: Sequence[AttentionCall]) -> list[Memory]:
    """What a prefill of these layers remembers when it comes to each: its plan is then what it is in the prefill."""
    memory, before = Memory(), []
    for call in calls:
        before.append(memory.copy())
        pipeline.run(call, memory)
    return before


def plan_only(given: Pipeline | Route, call: AttentionCall, memory: Memory) -> None:
    """Estimate and refine, part by part where the whole call runs so."""
    pipeline = Route.of(given).choose(call).pipeline
    for part in parts(pipeline, call, pipeline.limit(call.q.device)):
        pipeline.plan(part.of(call), memory)


@frozen
class Bench:
    """Measures cases one after the other. seed: of inputs and masks. dense, inputs: where other ones than ours count.

    Dense attention runs beside every case; where it takes longer than the clock's budget, beside the first of a shape.
    """

    clock: Clock
    seed: int = 0
    dense: Dense = baseline
    inputs: Inputs = call_of
    _known: dict[tuple[Shape, str], float] = field(factory=dict, init=False)

    def measure(self, case: Case) -> Row:
        """The row of a case. An error of the library, or lack of memory, is told in the row."""
        try:
            return self._row(case)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return Row(case=case, error=str(error).split("\n")[0])

    def _row(self, case: Case) -> Row:
        ready = prepare(case, self.clock.device, self.seed, self.dense, self.inputs)
        known = self._known.get((case.shape, ready.dense.kernel))
        if known is None:
            seconds, dense = self.clock.beside(ready.run, ready.dense.run)
            if dense > self.clock.budget:
                self._known[case.shape, ready.dense.kernel] = dense
        else:
            seconds, dense = self.clock.median(ready.run), known
        row = ready.row(seconds / case.layers, dense)
        if ready.plan is None or row.note:
            return row
        return evolve(row, estimate=self.clock.median(ready.plan) / case.layers)
