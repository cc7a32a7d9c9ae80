"""Seconds of a piece of work by the device's clock, next to dense attention in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from attrs import frozen
from sparseprefill.adapters.calibration.measure import Clock as Fastest
from sparseprefill.adapters.calibration.measure import Run

__all__ = ("Clock", "Run", "middle")
WARM = 3
ROW, MOST = 0.02, 50
"""Seconds that a round shall take at least on a GPU, and most runs in it."""


@frozen
class Clock(Fastest):
    """The clock of every bench. `median` and `beside` repeat a piece of work in rounds, of which the median counts; on
    a GPU a round runs short work several times in a row, as the layers of a model do: what the host spends on one
    launch hides behind the launch before it, unless it takes longer than the device's work.

    Of what takes longer than the budget the second run alone counts for a median.
    """

    def median(self, run: Run) -> float:
        """Median seconds of `run`, after warming up."""
        return statistics.median(self.times(run))

    def beside(self, run: Run, dense: Run) -> tuple[float, float]:
        """Median seconds of `run` and of `dense`, which runs before it and after it.

        The clock of a GPU follows its power limit, so that what ran a minute ago is no measure for what runs now.
        Where `dense` takes longer than the budget, one run of it, before, is all, and two where it is not much longer.
        """
        once = self.once(dense)
        if self.budget < once < 5 * self.budget:
            once = min(once, self.once(dense))
        if once > self.budget:
            return self.median(run), once
        before = self.times(dense, share=0.5)
        middle = self.times(run)
        return statistics.median(middle), statistics.median([*before, *self.times(dense, share=0.5)])

    def times(self, run: Run, share: float = 1.0) -> list[float]:
        """Seconds of each round after warming up. share: of the budget and the rounds."""
        budget, begin = self.budget * share, time.perf_counter()
        self.once(run)  # may compile kernels
        once = self.once(run)
        if once > budget:
            return [once]
        for _ in range(WARM - 2):
            self.once(run)
        spent = time.perf_counter() - begin
        count = self.in_a_row(once)
        left = budget - min(spent, budget / 2)
        rounds = max(2, round(min(self.rounds * share, left / max(once * count, 1e-6))))
        return [self.once(run, count) for _ in range(rounds)]

    def in_a_row(self, once: float) -> int:
        """How often a round repeats work that took `once` seconds."""
        return 1 if self.device.type != "cuda" else min(MOST, max(1, round(ROW / max(once, 1e-6))))


def middle(once: Callable[[], float], rounds: int) -> float:
    """For work that keeps time itself, already warm: the median of what `once` says in each of so many rounds, of two
    in the middle the longer."""
    return statistics.median_high(once() for _ in range(rounds))
