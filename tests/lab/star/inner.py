"""A method inside the blocks, with what it chose."""

from __future__ import annotations

from attrs import define
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.memory import Memory
from sparseprefill.metrics import lowest_rows, recall
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Result


@define(eq=False)
class Seen:
    """A method inside the blocks, and what it made of the last one."""

    pipeline: Pipeline
    last: tuple[AttentionCall, Result] | None = None

    def __call__(self, call: AttentionCall, memory: Memory) -> Tensor:
        """See Inner."""
        result = self.pipeline.run(call, memory)
        self.last = call, result
        return result.out

    def note(self) -> str:
        """Density and recall of the last block."""
        if self.last is None:
            return ""
        call, result = self.last
        kept = recall(call, result, rows=64)
        first, lowest = map(float, lowest_rows(kept))
        rows = f"rows: 1st percentile {first:.3f}, lowest {lowest:.3f}"
        return f"density {result.density:.3f}, recall {float(kept.mean()):.3f} ({rows})"
