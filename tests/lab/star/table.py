"""The table of the benchmark: every rank measures, the slowest counts, the first one writes."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from sparseprefill.adapters.star.ranks import RankError, Ranks
from sparseprefill.adapters.star.watch import EXIT, Watch

from lab.bench.clock import Clock, Run, middle

START = 3.0  # seconds to make tensors
OVER = 15.0  # seconds behind the budget at which a row that takes longer than thought is cut off


@define(eq=False)
class Table:
    """Rows, printed as they come. seconds: the budget, from `began`. path: a file for one JSON object a row.

    wanted: a regular expression that the rows to measure contain. A row that fails after as many collectives on every
    rank is noted, and the next one goes on. One that fails on a rank alone leaves the others in a collective, so it
    ends all of them, and what was measured before stands in the table.
    """

    ranks: Ranks
    device: torch.device
    seconds: float
    began: float = field(factory=time.monotonic)
    path: Path | None = None
    wanted: str = ""
    best: dict[tuple[int, str], float] = field(factory=dict)
    _watch: Watch | None = None
    _end: threading.Timer | None = None

    def __attrs_post_init__(self) -> None:
        self._watch = Watch.of(self.ranks, self.device)
        self._end = threading.Timer(max(self._left(), 0) + OVER, self._cut)
        self._end.daemon = True
        self._end.start()

    def close(self) -> None:
        """The last row is written."""
        if self._end is not None:
            self._end.cancel()

    def line(self, text: str) -> None:
        """A line, from the first rank."""
        if self.ranks.rank == 0:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def note(self, **facts: Any) -> None:
        """An object in the file, from the first rank."""
        if self.ranks.rank == 0 and self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(facts)}\n")

    def row(
        self,
        tokens: int,
        what: str,
        make: Callable[[], Run],
        *,
        seconds: float = 0.0,
        rounds: int = 5,
        base: str = "",
        against: str = "",
        note: Callable[[], str] = str,
    ) -> None:
        """Measure what `make` returns: the median of so many rounds after one to warm up, the slowest rank's.

        seconds: what a round may take; a row that would not end within the budget is left out. rounds: 0 takes the
        first run. base: what the row is called by those that are `against` it, of several the fastest; they show their
        speed-up over it. note: asked on every rank when the row is measured; the last rank's is shown.
        """
        if not re.search(self.wanted, what):
            return
        left = self.ranks.meet("a row", {"left": self._left()})[0]["left"]
        needed = START + seconds * (rounds + 1) if self.device.type == "cuda" else 0.0
        if left < needed:
            self._said(tokens, what, f"left out: {max(left, 0):.0f} s left, up to {needed:.0f} needed")
            return
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run = self._tried(tokens, what, make)
        found = None if run is None else self._tried(tokens, what, partial(self._measured, run, rounds, note))
        del run
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if found is None:
            return
        ms, memory, noted = found
        if base:
            self.best[tokens, base] = min(ms, self.best.get((tokens, base), ms))
        facts: dict[str, Any] = {"ms": round(ms, 3), "gib": round(memory, 2), "note": noted}
        shown, other = "", self.best.get((tokens, against))
        if other is not None:
            shown = f"speed-up {other / ms:.2f} over {against}"
            facts |= {"against": against, "speed_up": round(other / ms, 3)}
        self.note(tokens=tokens, row=what, **facts)
        self.line(f"| {tokens:>8} | {what} | {ms:.2f} | {shown} | {memory:.1f} | {noted} |")

    def _said(self, tokens: int, what: str, reason: str) -> None:
        self.note(tokens=tokens, row=what, failed=reason)
        self.line(f"| {tokens:>8} | {what} | {reason} | | | |")

    def _cut(self) -> None:
        sys.stderr.write(f"rank {self.ranks.rank}: a row took longer than estimated, and the time is up\n")
        sys.stderr.flush()
        os._exit(EXIT)

    def _left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def _tried(self, tokens: int, what: str, call: Callable[[], Any]) -> Any:
        """What a part of a row returns on this rank; None where it failed on any."""
        found, failed, begun = None, "", self._begun()
        try:
            with self.ranks.busy():
                found = call()
        except Exception as error:  # a row of a table must not cost the others
            failed = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            sys.stderr.write(f"rank {self.ranks.rank}: {what} at {tokens}:\n{traceback.format_exc()}\n")
            sys.stderr.flush()
        try:
            self.ranks.check()
            noted = found[2] if isinstance(found, tuple) else ""
            said = {"failed": failed, "begun": self._begun() - begun, "note": noted}
            answers = self.ranks.meet(what, said, failure=f"rank {self.ranks.rank} failed: {failed}" if failed else "")
        except RankError as error:
            self._said(tokens, what, f"failed: {error}")
            raise
        failures = [f"rank {rank}: {answer['failed']}" for rank, answer in enumerate(answers) if answer["failed"]]
        if not failures:
            return (*found[:2], answers[-1]["note"]) if isinstance(found, tuple) else found
        self._said(tokens, what, f"failed: {failures[0]}")
        if len({answer["begun"] for answer in answers}) > 1:
            raise RankError(self.ranks.tell(f"{what} at {tokens} left the ranks out of step: {'; '.join(failures)}"))
        gc.collect()  # what the error's frames held
        return None

    def _begun(self) -> int:
        """Collectives so far, PyTorch's own among them."""
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_backend(self.device)._get_sequence_number_for_group())

    def _measured(self, run: Run, rounds: int, note: Callable[[], str]) -> tuple[float, float, str]:
        if rounds:
            run()
        spent = middle(partial(self._together, run), max(rounds, 1)) * 1e3
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        mine = torch.tensor([spent, memory], device=self.device)
        ms, most = self.ranks.gather(mine).amax(0).tolist()
        return ms, most, note()

    def _together(self, run: Run) -> float:
        """Seconds of one run, which all ranks begin together."""
        self.ranks.gather(torch.zeros(1, device=self.device))
        return Clock(self.device).once(run)
