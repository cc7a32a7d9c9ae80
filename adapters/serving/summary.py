"""What a server's log says: the library's messages, and every so often what prefill did since the line before."""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable

from attrs import define, field

SECONDS = 10.0
"""Between two lines, where nothing else is asked for."""


@define(eq=False)
class Summary:
    """What prefill did since `line` was last called. Threads may share it. clock: seconds."""

    clock: Callable[[], float] = time.monotonic
    _since: float = field(init=False)
    _sparse: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    _reasons: Counter[str] = field(factory=Counter, init=False)
    _measured: list[float] = field(factory=list, init=False)
    _ever: tuple[float, int] = field(default=(0.0, 0), init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._since = self.clock()

    def add(self, tokens: int, reason: str | None) -> None:
        """One chunk of a prompt. reason: why it ran dense; None where it ran sparse."""
        with self._lock:
            self._tokens += tokens
            if reason is None:
                self._sparse += 1
            else:
                self._reasons[reason] += 1

    def densities(self, density: float) -> None:
        """The density of a measured call."""
        with self._lock:
            self._measured.append(density)
            self._ever = (self._ever[0] + density, self._ever[1] + 1)

    def line(self) -> str | None:
        """In words; None where there was no prefill. Begins anew."""
        with self._lock:
            now, begun = self.clock(), self._since
            sparse, tokens, reasons, measured = self._sparse, self._tokens, self._reasons, self._measured
            self._since, self._sparse, self._tokens = now, 0, 0
            self._reasons, self._measured = Counter(), []
            total, calls = self._ever
        if not sparse and not reasons:
            return None
        dense = f"{reasons.total()} dense"
        if reasons:
            ((why, count),) = reasons.most_common(1)
            dense += f" ({count}x {why})"
        parts = [f"{sparse} sparse", dense]
        if measured:
            parts.append(f"mean density {sum(measured) / len(measured):.3f}")
        elif sparse and calls:
            parts.append(f"mean density {total / calls:.3f} (measured before)")
        seconds = max(now - begun, 1e-9)
        parts.append(f"{tokens / seconds:.1f} tokens/s of prefill")
        return f"prefill chunks of the last {seconds:.0f} s: {', '.join(parts)}"


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
