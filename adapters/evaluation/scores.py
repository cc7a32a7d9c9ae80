"""The score of one contender on one task, and if its prefill ran sparse at all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from statistics import fmean, stdev

from attrs import evolve, field, frozen

from ..session.report import Report
from .outcome import Contender


@frozen
class Score:
    """One metric of a task.

    metric: its name in the harness, with the filter behind a comma where there is one. value: of all items. stderr: its
    standard error, None where neither the harness nor the items give one. higher_is_better: which way it counts.
    values: of each item, in their order; empty where the metric is not made of numbers of single items. lost, won:
    items that score lower and higher than with the stock model; None where they are not known.
    """

    metric: str
    value: float
    stderr: float | None = None
    higher_is_better: bool = True
    values: tuple[float, ...] = field(default=(), repr=False)
    lost: int | None = None
    won: int | None = None

    @classmethod
    def of(cls, metric: str, value: float, stderr: float | None, higher: bool, values: tuple[float, ...]) -> Score:
        """A score; its standard error is that of the items' mean, where this is the value and the harness has none."""
        is_mean = len(values) > 1 and math.isclose(fmean(values), value, abs_tol=1e-9)
        if stderr is None and is_mean:
            stderr = stdev(values) / math.sqrt(len(values))
        return cls(metric, value, stderr, higher, values)

    def beside(self, stock: Run | None) -> Score:
        """With `lost` and `won`, where the stock model's run has the same items."""
        known = () if stock is None else stock.scores
        values = next((one.values for one in known if one.metric == self.metric), ())
        if not values or len(self.values) != len(values):
            return self
        sign = 1 if self.higher_is_better else -1
        changes = [sign * (mine - other) for mine, other in zip(self.values, values, strict=True)]
        return evolve(self, lost=sum(change < 0 for change in changes), won=sum(change > 0 for change in changes))


@frozen
class Service:
    """The prefill of an attached model, over all items and layers.

    sparse_calls, window_calls, dense_calls: calls of a layer through the method's mask, an exact sliding window, and
    the host's own attention. reasons: why calls were dense, with counts. density: computed / causal pairs of the sparse
    calls, mean over the layers; None where there was none. min_query: query rows from which a forward is prefill.
    notes: what else the attachment noted, with counts.
    """

    sparse_calls: int
    window_calls: int
    dense_calls: int
    min_query: int
    density: float | None = None
    reasons: Mapping[str, int] = field(factory=dict)
    notes: Mapping[str, int] = field(factory=dict)

    @classmethod
    def of(cls, report: Report) -> Service:
        """From what an attachment reports that measured every call."""
        known = [one.mean_density for one in report.layers if one.mean_density is not None]
        return cls(
            sum(one.sparse_calls for one in report.layers),
            sum(one.window_calls for one in report.layers),
            sum(one.dense_calls for one in report.layers),
            report.min_query,
            fmean(known) if known else None,
            dict(Counter(report.fallbacks).most_common()),
            dict(report.notes),
        )

    @property
    def doubt(self) -> str:
        """Reason for which the score is not, or not wholly, one of sparse prefill; empty where every call ran through
        the method."""
        why = "; ".join(f"{reason} ({count}x)" for reason, count in self.reasons.items())
        if not self.sparse_calls:
            if not why:
                why = "only exact sliding windows" if self.window_calls else f"no prompt has {self.min_query} tokens"
            return f"never ran sparse; its score is that of dense attention: {why}"
        calls = self.sparse_calls + self.window_calls + self.dense_calls
        return f"dense in {self.dense_calls:,} of {calls:,} layer calls: {why}" if self.dense_calls else ""


@frozen
class Run:
    """One contender on one task.

    task: its name in the harness. length: of RULER's items, in tokens with the answer; None for tasks whose items have
    a length of their own. items: that were asked. tokens: of a prompt, mean over the items, before anything is cut.
    seconds: for all items, what the harness does around the model included. scores: one for each metric. service: how
    the prefill ran, None for the stock model. warnings: what the harness warned of, with counts; numbers are written
    as N. error: what stopped it; nothing but task, length and contender is known then.
    """

    task: str
    length: int | None
    contender: Contender
    items: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    scores: tuple[Score, ...] = ()
    service: Service | None = None
    warnings: Mapping[str, int] = field(factory=dict)
    error: str = ""

    @property
    def title(self) -> str:
        """Task and length."""
        return self.task if self.length is None else f"{self.task} {self.length:,}"
