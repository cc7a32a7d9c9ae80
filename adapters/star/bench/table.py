"""Clock and table of the benchmark: every rank measures, the slowest counts, the first one writes."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from attrs import define, field

from ..ranks import Ranks

Run = Callable[[], object]


@define
class Table:
    """Rows of milliseconds, printed as they come. seconds: the budget, from when the table is made."""

    ranks: Ranks
    device: torch.device
    seconds: float
    began: float = field(factory=time.monotonic)
    times: dict[tuple[int, str], float] = field(factory=dict)

    def line(self, text: str) -> None:
        """A line, from the first rank."""
        if self.ranks.rank == 0:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def row(
        self, tokens: int, what: str, make: Callable[[], Run], *, note: Callable[[], str] = str, rounds: int = 5
    ) -> None:
        """Measure what `make` returns: the median of so many rounds after one to warm up, the slowest rank's.

        note: asked on every rank when the row is measured; the last rank's is shown. rounds: 0 takes the first run. A
        row that would begin after the budget is left out; one that fails says why, and the next one goes on.
        """
        left = self.ranks.meet("a row", {"left": self.seconds - (time.monotonic() - self.began)})[0]["left"]
        if left <= 0:
            self.line(f"| {tokens:>8} | {what} | left out: the time is up | | |")
            return
        failed = noted = ""
        try:
            self.times[tokens, what] = self._measured(make(), rounds)
            noted = note()
        except Exception as error:  # a row of a table must not cost the others
            failed = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            sys.stderr.write(f"rank {self.ranks.rank}: {what} at {tokens}:\n{traceback.format_exc()}\n")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        answers = self.ranks.meet("the next row", {"failed": failed, "note": noted})
        failed = next((answer["failed"] for answer in answers if answer["failed"]), "")
        if failed:
            self.line(f"| {tokens:>8} | {what} | failed: {failed} | | |")
            return
        figures = f"{self.times[tokens, what]:.2f} | {self._ratio(tokens, what)}"
        self.line(f"| {tokens:>8} | {what} | {figures} | {answers[-1]['note']} |")

    def _ratio(self, tokens: int, what: str) -> str:
        base = self.times.get((tokens, "ring"))
        return "" if base is None or what == "ring" else f"{base / self.times[tokens, what]:.2f}"

    def _measured(self, run: Run, rounds: int) -> float:
        if rounds:
            run()
        spent = []
        for _ in range(max(rounds, 1)):
            self._together()
            spent.append(self._once(run))
        worst = torch.tensor(sorted(spent)[len(spent) // 2], device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def _together(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _once(self, run: Run) -> float:
        """Milliseconds."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))
