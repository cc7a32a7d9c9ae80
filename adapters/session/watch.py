"""Recall at work: what a few query rows kept, in one prefill of many; figures come to the host by themselves."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.metrics import watched_recall
from sparseprefill.plan import Result
from sparseprefill.refiners.recall import SLACK

from .ledger import Uncounted, recording
from .report import LayerRecall

RECALL_EVERY = 100
"""Prefills of which one is measured, by default."""
MOST_EVERY = (1 << 31) - 1
WAITING = 4096
"""Calls whose figures may be on their way at once; of more the oldest, which is there for long, is waited for."""
STEPS = 200
"""Rows are counted by what they keep, in steps of so much: of any number of calls the counts alone are kept."""
LOST = "recall could not be measured: memory ran out"
NONFINITE = "recall could not be measured: it is NaN, as with queries or keys that are NaN"
LOW = (
    "%s: layer %d, head %d keeps %.3f of the attention mass of sampled rows, less than strict_recall, %g; further "
    "calls are counted in the report"
)
log = logging.getLogger(__name__)


@frozen
class CallRecall:
    """One measured call of a layer: mean recall of each head over the rows that are spread over the call, and over its
    last rows; empty where there are none. first_head: the model's number of the first. density: computed / allowed
    pairs of the call. row_p1: 1st percentile of the rows that are spread over the call, of all heads. row_lowest: the
    lowest of all its rows, the last ones too. low: whether one of the heads keeps less than `strict_recall`. keys: of
    the call."""

    layer: int
    first_head: int
    spread: tuple[float, ...]
    last: tuple[float, ...]
    density: float = math.nan
    row_p1: float = math.nan
    row_lowest: float = math.nan
    low: bool = False
    keys: int = 0

    @property
    def least(self) -> tuple[float, int]:
        """The head that keeps least, by either kind of rows: its recall, and its number in the model."""
        each = [min(pair) for pair in zip(self.spread, self.last or self.spread, strict=True)]
        head = min(range(len(each)), key=each.__getitem__)
        return each[head], self.first_head + head


Hear = Callable[[CallRecall], None]
"""Called with every measured call, as its figures arrive."""


@frozen(eq=False)
class _Coming:
    """Figures of a call on their way, as `_figures` packs them.

    there: what tells that they have arrived; None where they have, or where only reading them tells. keys: of the call.
    """

    layer: int
    first_head: int
    figures: Tensor
    there: torch.cuda.Event | None
    keys: int = 0

    @classmethod
    def of(cls, call: AttentionCall, figures: Tensor) -> _Coming:
        """Sends them to the host; nothing waits."""
        if figures.device.type != "cuda":
            return cls(call.layer, call.first_head, figures, None, call.kv_len)
        host = torch.empty(figures.shape, dtype=figures.dtype, device="cpu", pin_memory=True)
        host.copy_(figures, non_blocking=True)
        there = torch.cuda.Event()
        there.record(torch.cuda.current_stream(figures.device))
        return cls(call.layer, call.first_head, host, there, call.kv_len)

    @property
    def arrived(self) -> bool:
        """True if reading them makes nobody wait, as far as can be told."""
        return self.figures.device.type == "cpu" if self.there is None else self.there.query()

    def read(self) -> _Kept:
        """Waits until they are there."""
        if self.there is not None:
            self.there.synchronize()
        *sums, density, lowest = self.figures[: -STEPS - 1].double().tolist()
        both = torch.tensor(sums, dtype=torch.float64, device="cpu").view(2, -1)
        return _Kept(self.first_head, both, lowest, self.figures[-STEPS - 1 :].to(torch.int64), density)


@define(eq=False)
class _Kept:
    """Mass kept by rows of one call, or of all measured calls of a layer; on the host.

    sums: float64 ``[2, Hq + 1]``, of the rows that are spread over a call and of the last ones, each head's sum and how
    many rows. row_lowest: of all of them. below: int64 ``[STEPS + 1]``, of the first kind over all heads, how many keep
    no more than each step. density: of one call. calls, low: how many, and in how many a head kept too little.
    """

    first_head: int
    sums: Tensor
    row_lowest: float
    below: Tensor
    density: float = math.nan
    calls: int = 1
    low: int = 0

    def add(self, one: _Kept) -> None:
        """One more call."""
        self.sums, self.below = self.sums + one.sums, self.below + one.below
        self.row_lowest = min(self.row_lowest, one.row_lowest)
        self.calls, self.low = self.calls + one.calls, self.low + one.low

    def means(self, layer: int) -> CallRecall:
        """Means over the rows. Rounding may take a full row a little above 1."""
        spread, last = (tuple(min(x / row[-1], 1.0) for x in row[:-1]) if row[-1] else () for row in self.sums.tolist())
        return CallRecall(layer, self.first_head, spread, last, self.density, _percentile(self.below), self.row_lowest)

    def report(self) -> LayerRecall:
        """Mass kept by all calls together."""
        found = self.means(0)
        (least, head), mean = found.least, sum(found.spread) / len(found.spread)
        rows = {"row_p1": found.row_p1, "row_lowest": found.row_lowest}
        return LayerRecall(mean=mean, least=least, head=head, **rows, calls=self.calls, low_calls=self.low)


@define(eq=False)
class RecallWatch:
    """Measures the recall of one prefill in `every` (0: of none), the first among them: of all its sparse layers and
    chunks.

    What is measured stays on the device until it has come to the host by itself; `read` takes in what has, and never
    waits. Threads may share it. method: for messages. strict: below it a call is counted as low, and the first is
    logged as a warning; None for neither. hear: told of every measured call. note: counts what could not be measured.
    prefills, measured: how many there were, and how many of them were chosen. coming: figures on their way.
    """

    method: str
    every: int
    strict: float | None = None
    hear: Hear | None = None
    note: Callable[[str], None] | None = None
    prefills: int = field(default=0, init=False)
    measured: int = field(default=0, init=False)
    coming: deque[_Coming] = field(factory=deque, init=False)
    _warned: bool = field(default=False, init=False)
    _layers: dict[int, _Kept] = field(factory=dict, init=False)
    _lock: threading.RLock = field(factory=threading.RLock, init=False)

    def choose(self) -> bool:
        """True if one more prefill is measured: by its number alone."""
        with self._lock:
            chosen = self.prefills % self.every == 0
            self.prefills += 1
            self.measured += chosen
        return chosen

    def measure(self, call: AttentionCall, result: Result) -> None:
        """Measure a call of a chosen prefill. Lack of memory is noted, and keeps nobody from the result."""
        if recording():
            return
        try:
            with torch.cuda.device_of(call.q):
                coming = _Coming.of(call, _figures(call, result))
        except torch.OutOfMemoryError:
            self._told(LOST)
            return
        with self._lock:
            self.coming.append(coming)
        self.read()

    def read(self, wait: bool = False) -> None:
        """Take in the figures that have arrived. wait: those on their way, too (host sync)."""
        if not self.coming or recording():
            return
        with self._lock:
            while self.coming and (wait or len(self.coming) > WAITING or self.coming[0].arrived):
                self._take(self.coming.popleft())

    def report(self) -> dict[int, LayerRecall]:
        """Mass kept by every measured layer (waits for what is on its way: host sync)."""
        with self._lock:
            self.read(wait=True)
            return {layer: found.report() for layer, found in self._layers.items()}

    def _take(self, coming: _Coming) -> None:
        one = coming.read()
        if not one.sums[0, -1]:  # padding alone
            return
        if bool(one.sums.isnan().any()):
            self._told(NONFINITE)
            return
        found = evolve(one.means(coming.layer), keys=coming.keys)
        least, head = found.least
        if self.strict is not None and least < self.strict - SLACK:
            found, one.low = evolve(found, low=True), 1
            if not self._warned:
                self._warned = True
                log.warning(LOW, self.method, found.layer, head, least, self.strict)
        if found.layer in self._layers:
            self._layers[found.layer].add(one)
        else:
            self._layers[found.layer] = one
        if self.hear is not None:
            self.hear(found)

    def _told(self, text: str) -> None:
        if self.note is not None:
            self.note(text)


def _figures(call: AttentionCall, result: Result) -> Tensor:
    """``[2 * (Hq + 1) + 2 + STEPS + 1]`` over batch rows, on the call's device: `_Kept.sums`, the call's density, its
    lowest row, and `_Kept.below`."""
    found = watched_recall(call, result)
    kept = torch.where(found.real[:, None], found.kept, 0.0)
    parts = (slice(found.spread), slice(found.spread, None))
    sums = [x for at in parts for x in (kept[..., at].sum((0, 2)), found.real[:, at].sum()[None])]
    # Rounding may take a full row a little above 1. What is NaN is beyond every step: no row, or one told by the sums.
    rows = found.kept.clamp(max=1.0).nan_to_num(nan=2.0)
    steps = torch.arange(STEPS + 1, device=rows.device, dtype=rows.dtype) / STEPS
    below = torch.searchsorted(rows[..., parts[0]].flatten().sort().values, steps, right=True)
    return torch.cat([*sums, Uncounted.of(result).density()[None], rows.min()[None], below]).to(kept.dtype)


def _percentile(below: Tensor) -> float:
    """The 1st percentile of rows, as of `lowest_rows` but to the next step above."""
    nth = torch.div(below[-1:], 100, rounding_mode="floor")
    return int(torch.searchsorted(below, nth, right=True)) / STEPS
