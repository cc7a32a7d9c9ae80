"""For vLLM's metrics endpoint: calls, fallbacks by reason, pairs computed, and the recall of measured calls."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from ..session.ledger import Uncounted

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.plan import Result

    from ..session.watch import CallRecall

NUMBER = re.compile(r"(?<![\w.])\d+(\.\d+)?")
"""Lengths and the like in a reason: left out, since each text of a label is a time series of its own."""
CLASSES = 4
"""Classes of neighbouring layers that recall is told by: each has a time series for every bucket."""
BUCKETS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 0.999, 1.0)
"""Upper bounds of the histogram of recall, which is never above 1."""


@define(eq=False)
class Tally:
    """Counts of one engine in one process, told to Prometheus.

    measure: count pairs, too (host sync a call). layers: of the model, 0 where that is not known.
    """

    measure: bool = False
    layers: int = 0
    _pairs: dict[int, tuple[int, int]] = field(factory=dict, init=False)

    def observe(self, call: AttentionCall, result: Result) -> None:
        """A layer ran sparse."""
        metrics = _metrics()
        metrics.calls.labels(mode="sparse").inc()
        if self.measure:
            done, allowed = Uncounted.of(result).count()
            metrics.pairs.labels(kind="computed").inc(done)
            metrics.pairs.labels(kind="causal").inc(allowed)
            before = self._pairs.get(call.layer, (0, 0))
            self._pairs[call.layer] = (before[0] + done, before[1] + allowed)

    def fallback(self, reason: str) -> None:
        """A layer ran a request's chunk dense."""
        metrics = _metrics()
        metrics.calls.labels(mode="dense").inc()
        metrics.fallbacks.labels(reason=NUMBER.sub("N", reason)).inc()

    def recall(self, found: CallRecall) -> None:
        """The recall of a measured call is known."""
        metrics, layers = _metrics(), self.layer_class(found.layer)
        each = metrics.recall.labels(layers=layers)
        for kept in found.spread:
            each.observe(kept)
        if found.low:
            metrics.low.labels(layers=layers).inc()

    def layer_class(self, layer: int) -> str:
        """The neighbours that a layer is counted with, as ``0-7``: of each model about a quarter of its layers."""
        if not 0 <= layer < self.layers:
            return "other"
        nth = next(i for i in range(CLASSES) if layer < self.layers * (i + 1) // CLASSES)
        first, behind = (self.layers * (nth + more) // CLASSES for more in (0, 1))
        return str(first) if behind == first + 1 else f"{first}-{behind - 1}"

    def means(self) -> dict[int, float]:
        """Mean density by layer, over all measured calls."""
        return {layer: done / allowed for layer, (done, allowed) in self._pairs.items() if allowed}


@frozen
class _Metrics:
    """Of prometheus_client."""

    calls: Any
    fallbacks: Any
    pairs: Any
    recall: Any
    low: Any


@cache
def _metrics() -> _Metrics:
    """One set a process. prometheus_client is there because vLLM needs it."""
    from prometheus_client import Counter, Histogram

    return _Metrics(
        Counter("sparseprefill:prefill_calls", "Prefill chunks of a layer, by how they ran.", ["mode"]),
        Counter("sparseprefill:fallbacks", "Prefill chunks of a layer that ran dense, by reason.", ["reason"]),
        Counter("sparseprefill:pairs", "Query-key pairs, computed and causal.", ["kind"]),
        Histogram(
            "sparseprefill:recall",
            "Attention mass that a head keeps of sampled query rows, in measured prefill chunks of a layer.",
            ["layers"],
            buckets=BUCKETS,
        ),
        Counter(
            "sparseprefill:low_recall_calls", "Measured prefill chunks of a layer below strict_recall.", ["layers"]
        ),
    )
