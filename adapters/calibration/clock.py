"""Seconds of a piece of work, by the clock of the device that does it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen


@frozen
class Clock:
    """The fastest of repeated runs: whatever else goes on at a machine only adds to a time.

    repeats: runs that count, fewer where they would take longer than `budget` seconds, but two at least.
    """

    device: torch.device
    repeats: int
    budget: float = 1.0

    def seconds(self, run: Callable[[], Any]) -> float:
        """Seconds of `run`, whose first run does not count: it compiles kernels and fills caches."""
        run()
        once = self._timed(run, 1)
        more = max(1, min(self.repeats, int(self.budget / max(once[0], 1e-6))) - 1)
        return min(once + self._timed(run, more))

    def _timed(self, run: Callable[[], Any], count: int) -> list[float]:
        if self.device.type != "cuda":
            return [_wall(run) for _ in range(count)]
        with torch.cuda.device(self.device):
            marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            for first, last in marks:
                torch.cuda.synchronize()  # each run from a device at rest: launches count, as for a short prompt
                first.record()
                run()
                last.record()
            torch.cuda.synchronize()
        return [first.elapsed_time(last) / 1000 for first, last in marks]


def _wall(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
