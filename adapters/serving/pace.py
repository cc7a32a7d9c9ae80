"""Seconds that a step with prefill took by itself, however long the server then waits for the next request.

From the step's beginning to the end of its last attention layer. On a GPU that is told by events in its queue, which
are read once they are there: nothing waits for the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from attrs import define, field, frozen

from ..session.ledger import recording


@frozen(eq=False)
class Mark:
    """A moment of a step: by the host's clock, or where there is a GPU by an event in its queue."""

    seconds: float
    event: torch.cuda.Event | None = None

    @classmethod
    def now(cls, clock: Callable[[], float]) -> Mark:
        """The moment that the device's queue has come to. clock: the host's, in seconds."""
        if not torch.cuda.is_initialized():
            return cls(clock())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(0.0, event)

    @property
    def passed(self) -> bool:
        """True if the device is through with all that was queued before; never waits."""
        return self.event is None or self.event.query()

    def until(self, later: Mark) -> float:
        """Seconds to a later one, when both have passed."""
        if self.event is None or later.event is None:
            return later.seconds - self.seconds
        return float(self.event.elapsed_time(later.event)) / 1e3


@define(eq=False)
class Pace:
    """Steps that are over, and are told once their time is known. Threads may share it.

    tell: called with the tokens of a step's prompts and its seconds. clock: seconds.
    """

    tell: Callable[[int, float], None]
    clock: Callable[[], float] = time.perf_counter
    _coming: deque[tuple[int, Mark, Mark]] = field(factory=deque, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def begin(self, tokens: int, chunks: int) -> Step:
        """A step begins. tokens: of its prompts. chunks: of them, for whose layers it lasts."""
        return Step(self, tokens, chunks, Mark.now(self.clock))

    def over(self, step: Step) -> None:
        """A step is through its last layer."""
        if not recording():
            self._coming.append((step.tokens, step.begun, Mark.now(self.clock)))

    def read(self) -> None:
        """Tell of the steps whose time is known by now; never waits."""
        if not self._coming or recording():
            return
        with self._lock:
            while self._coming and self._coming[0][1].passed and self._coming[0][2].passed:
                tokens, begun, ended = self._coming.popleft()
                self.tell(tokens, begun.until(ended))


@define(eq=False)
class Step:
    """A step on its way through the layers. left: chunks that are not through all of theirs."""

    pace: Pace
    tokens: int
    left: int
    begun: Mark

    def through(self) -> None:
        """One of its chunks is through its last layer."""
        self.left -= 1
        if not self.left:
            self.pace.over(self)
