"""Counts of prompts by how they ran, and of the tokens that a cache held before them."""

from __future__ import annotations

import threading
from collections import Counter

from attrs import define, field

from sparseprefill.breakeven.before import Before

from .report import Mode


@define(eq=False)
class Prompts:
    """ran: prompts by how they ran, and behind what, as "sparse behind dense". cached: tokens that a cache held before
    them, by how they were computed."""

    ran: Counter[str] = field(factory=Counter, init=False)
    cached: Counter[str] = field(factory=Counter, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def count(self, mode: Mode, before: Before | None) -> None:
        """A prompt ran in a mode. before: what a cache held of it; None for nothing, or where nobody tells."""
        with self._lock:
            self.ran[mode if before is None else f"{mode} behind {before.mostly}"] += 1
            for how, tokens in by_how(before).items():
                self.cached[how] += tokens


def by_how(before: Before | None) -> dict[str, int]:
    """Cached tokens by how they were computed; without those that there are none of."""
    if before is None:
        return {}
    found = {"sparse": before.sparse, "dense": before.dense, "unknown": before.unknown}
    return {how: tokens for how, tokens in found.items() if tokens}
