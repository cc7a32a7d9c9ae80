"""Measures cases: a call's time next to dense attention, and what was kept of the attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve, field, frozen

from sparseprefill.call import AttentionCall
from sparseprefill.errors import SparsePrefillError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.memory import Memory
from sparseprefill.metrics import recall
from sparseprefill.plan import Plan, Result
from sparseprefill.route import gated

from .baseline import Baseline, baseline
from .case import Case, Shape
from .clock import Clock
from .inputs import call_of
from .layers import plan_only
from .masks import random_mask

ROWS = 64


@frozen(kw_only=True)
class Row:
    """What was measured of a case, seconds by the device's clock.

    baseline: name of the dense kernel. estimate: seconds until the mask is there, of `seconds`. recall, lowest: share
    of the attention mass kept, mean over heads and sampled rows, and of the head that keeps least. extra: most bytes
    held beyond inputs and result, on GPUs. parts: that a long call ran in. note: why it ran dense. error: what stopped
    it.
    """

    case: Case
    seconds: float = 0.0
    dense: float = 0.0
    baseline: str = ""
    density: float = 1.0
    estimate: float | None = None
    recall: float | None = None
    lowest: float | None = None
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

    run: the call. plan: all of it but the executor; None for masks. dense: the yardstick.
    """

    case: Case
    call: AttentionCall
    run: Callable[[], Result]
    plan: Callable[[], Any] | None
    dense: Baseline

    def row(self, seconds: float, dense: float, **more: Any) -> Row:
        """The row of a table; runs the call once more, for density, recall and memory."""
        result, extra = self._once()
        facts: dict[str, Any] = {"density": result.density, "extra": extra, "note": result.dense}
        facts["parts"] = 1 if result.parts is None else result.parts.count
        if self.plan is not None:
            kept = recall(self.call, result, rows=ROWS).nanmean(-1)
            facts |= {"recall": float(kept.mean()), "lowest": float(kept.min())}
        return Row(case=self.case, seconds=seconds, dense=dense, baseline=self.dense.kernel, **facts, **more)

    def _once(self) -> tuple[Result, int | None]:
        device = self.call.q.device
        if device.type != "cuda":
            return self.run(), None
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = self.run()
        torch.cuda.synchronize(device)
        held = sum(x.numel() * x.element_size() for x in (result.out, result.lse))
        return result, torch.cuda.max_memory_allocated(device) - before - held


def prepare(case: Case, device: torch.device, seed: int = 0) -> Ready:
    """Make inputs, mask and yardstick. Raises ParameterError for what cannot be."""
    call = call_of(case.shape, case.input, seed, device)
    dense = baseline(call, case.shape.lengths)
    if case.pipeline is None:
        plan, executor = Plan(random_mask(call, case.mask, seed)), AutoExecutor()
        return Ready(case=case, call=call, run=lambda: executor.execute(call, plan), plan=None, dense=dense)
    plain = gated(case.pipeline, None)
    pipeline = gated(plain) if case.gate else plain
    # Of one prefill: what a method remembers of its first layer is there in the layers behind it, and so here.
    memory = Memory()
    return Ready(
        case=case,
        call=call,
        run=lambda: pipeline.run(call, memory),
        plan=lambda: plan_only(plain, call, memory),
        dense=dense,
    )


@frozen
class Bench:
    """Measures cases one after the other. seed: of inputs and masks.

    Dense attention runs beside every case; where it takes longer than the clock's budget, beside the first of a shape.
    """

    clock: Clock
    seed: int = 0
    _known: dict[tuple[Shape, str], float] = field(factory=dict, init=False)

    def measure(self, case: Case) -> Row:
        """The row of a case. An error of the library, or lack of memory, is told in the row."""
        try:
            return self._row(case)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return Row(case=case, error=str(error).split("\n")[0])

    def _row(self, case: Case) -> Row:
        ready = prepare(case, self.clock.device, self.seed)
        known = self._known.get((case.shape, ready.dense.kernel))
        if known is None:
            seconds, dense = self.clock.beside(ready.run, ready.dense.run)
            if dense > self.clock.budget:
                self._known[case.shape, ready.dense.kernel] = dense
        else:
            seconds, dense = self.clock.median(ready.run), known
        row = ready.row(seconds, dense)
        return row if ready.plan is None or row.note else evolve(row, estimate=self.clock.median(ready.plan))
