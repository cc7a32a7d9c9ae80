"""A server's log: the library's messages, and every so often what prefill did since the line before."""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field, frozen

from ..session.kinds import Kinds

SECONDS = 10.0
"""Between two lines, where nothing else is asked for."""
MOST_WAITING = 1024
"""Kinds of calls, and of densities, that wait for a line, beyond which the oldest are let go."""


@frozen
class Kind:
    """Calls whose densities may stand for each other. profile: that the request asked for, empty for none. keys: of the
    call."""

    profile: str
    keys: int


@define(eq=False)
class Summary:
    """Account of prefill since `line` was last called. Threads may share it. clock: seconds.

    Tokens per second are those of the steps whose time is known, by that time: no waiting for requests is in it.
    A density is told with the calls that it was measured on: chunks are counted when they are over, and figures come
    from the device earlier or later, so those of a kind that no line has told yet wait for it.
    """

    clock: Callable[[], float] = time.monotonic
    _since: float = field(init=False)
    _sparse: int = field(default=0, init=False)
    _timed: tuple[int, float] = field(default=(0, 0.0), init=False)
    _reasons: Kinds = field(factory=Kinds, init=False)
    _calls: Counter[Kind] = field(factory=Counter, init=False)
    _measured: dict[Kind, tuple[float, int]] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._since = self.clock()

    def dense(self, reason: str) -> None:
        """One chunk of a prompt ran dense, for this reason."""
        with self._lock:
            self._reasons.add(reason)

    def step(self, tokens: int, seconds: float) -> None:
        """A step took so long for so many tokens of prompts."""
        with self._lock:
            self._timed = self._timed[0] + tokens, self._timed[1] + seconds

    def sparse(self, kind: Kind, calls: int) -> None:
        """One chunk of a prompt ran sparse, in so many layers."""
        with self._lock:
            self._sparse += 1
            self._calls[kind] += calls
            _forget(self._calls)

    def density(self, kind: Kind, density: float) -> None:
        """The density of a measured call."""
        with self._lock:
            total, count = self._measured.get(kind, (0.0, 0))
            self._measured[kind] = total + density, count + 1
            _forget(self._measured)

    def line(self) -> str | None:
        """In words; None where there was no prefill. Begins anew."""
        with self._lock:
            now, begun = self.clock(), self._since
            sparse, reasons, calls = self._sparse, self._reasons.counts(), self._calls
            self._since, self._sparse = now, 0
            self._reasons, self._calls = Kinds(), Counter()
            measured = {kind: self._measured.pop(kind, (0.0, 0)) for kind in calls}
            if not sparse and not reasons:
                return None
            (tokens, seconds), self._timed = self._timed, (0, 0.0)
        dense = f"{sum(reasons.values())} dense"
        if reasons:
            why, count = max(reasons.items(), key=lambda one: one[1])
            dense += f" ({count}x {why})"
        pace = [f"{tokens / seconds:.1f} tokens/s of prefill"] if seconds > 0 else []
        parts = [f"{sparse} sparse", dense, *_densities(calls, measured), *pace]
        return f"prefill chunks of the last {now - begun:.0f} s: {', '.join(parts)}"


def _forget(kinds: dict[Kind, Any]) -> None:
    """Let the oldest go where no line has asked for long, as where none is logged."""
    if len(kinds) > MOST_WAITING:
        del kinds[next(iter(kinds))]


def _densities(calls: Counter[Kind], measured: Mapping[Kind, tuple[float, int]]) -> list[str]:
    """The mean density of each profile's calls, in words: of those that were measured, and how many they are.

    measured: sum of densities and number of calls.
    """
    said = []
    for profile in sorted({kind.profile for kind in calls}):
        mine = [kind for kind in calls if kind.profile == profile]
        count, found = sum(calls[kind] for kind in mine), sum(measured[kind][1] for kind in mine)
        whose = f"profile {profile}: " if profile else ""
        some = f" ({found} of {count} calls measured)" if found < count else ""
        mean = sum(measured[kind][0] for kind in mine) / max(found, 1)
        said.append(whose + (f"mean density {mean:.3f}{some}" if found else "density not measured"))
    return said


def every(seconds: float, owner: object, tell: Callable[[], None]) -> threading.Thread:
    """Call the method `tell` of `owner` every so many seconds, in a thread that ends with its owner."""
    method = weakref.WeakMethod(tell)
    ended = threading.Event()
    weakref.finalize(owner, ended.set)

    def run() -> None:
        while not ended.wait(seconds):
            call = method()
            if call is None:
                return
            call()
            del call  # it keeps the owner alive

    thread = threading.Thread(target=run, name="sparseprefill-summary", daemon=True)
    thread.start()
    return thread


def show(level: str, server: str = "") -> None:
    """Give the library's loggers a level, and the handlers of a server's logger, such as ``vllm``: by themselves they
    would be silent below a warning. Where the server logs through the root, they need no handlers."""
    ours, theirs = logging.getLogger("sparseprefill"), logging.getLogger(server)
    if server and not ours.handlers:
        for handler in theirs.handlers:
            mine = copy.copy(handler)  # the server's own drop what its level leaves out
            mine.setLevel(logging.NOTSET)
            ours.addHandler(mine)
            ours.propagate = False
    ours.setLevel(level.upper())
