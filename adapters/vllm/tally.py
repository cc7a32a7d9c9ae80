"""Counters for vLLM's metrics endpoint: calls, fallbacks by reason, and pairs computed."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import define, field

from ..session.ledger import Uncounted

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.plan import Result

NUMBER = re.compile(r"(?<![\w.])\d+(\.\d+)?")
"""Lengths and the like in a reason: left out, since each text of a label is a time series of its own."""


@define(eq=False)
class Tally:
    """Counts of one engine in one process, told to Prometheus. measure: count pairs, too (host sync a call)."""

    measure: bool = False
    _pairs: dict[int, tuple[int, int]] = field(factory=dict, init=False)

    def observe(self, call: AttentionCall, result: Result) -> None:
        """A layer ran sparse."""
        calls, _, pairs = _counters()
        calls.labels(mode="sparse").inc()
        if self.measure:
            done, allowed = Uncounted.of(result).count()
            pairs.labels(kind="computed").inc(done)
            pairs.labels(kind="causal").inc(allowed)
            before = self._pairs.get(call.layer, (0, 0))
            self._pairs[call.layer] = (before[0] + done, before[1] + allowed)

    def fallback(self, reason: str) -> None:
        """A layer ran a request's chunk dense."""
        calls, fallbacks, _ = _counters()
        calls.labels(mode="dense").inc()
        fallbacks.labels(reason=NUMBER.sub("N", reason)).inc()

    def means(self) -> dict[int, float]:
        """Mean density by layer, over all measured calls."""
        return {layer: done / allowed for layer, (done, allowed) in self._pairs.items() if allowed}


@cache
def _counters() -> tuple[Any, Any, Any]:
    """Calls, fallbacks, pairs; one set a process. prometheus_client is there because vLLM needs it."""
    from prometheus_client import Counter

    return (
        Counter("sparseprefill:prefill_calls", "Prefill chunks of a layer, by how they ran.", ["mode"]),
        Counter("sparseprefill:fallbacks", "Prefill chunks of a layer that ran dense, by reason.", ["reason"]),
        Counter("sparseprefill:pairs", "Query-key pairs, computed and causal.", ["kind"]),
    )
