"""For a server's metrics endpoint: chunks and tokens of prefill, calls of layers, fallbacks, and what was measured."""

# prometheus_client is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from attrs import define, field, frozen

from sparseprefill import __version__
from sparseprefill.breakeven.before import Before
from sparseprefill.errors import numberless

from ..session.kinds import MOST, OTHERS, Code, Why
from ..session.ledger import Ran, by_how
from ..session.report import Mode
from ..session.session import Session
from ..session.watch import CallRecall
from .pace import Step
from .summary import Kind, Summary

CLASSES = 4
"""Classes of neighbouring layers that figures are told by: each has a time series for every bucket."""
OWNER = ("model_name", "method", "worker", "profile")
"""Labels of every metric; the first is called as in the servers' own."""
RECALLS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 0.99, 0.999, 1.0)
"""Upper bounds of the histogram of recall, which is never above 1."""
ROW_RECALLS = (0.01, 0.03, 0.1, 0.2, *RECALLS)
"""Upper bounds of the histograms of single rows, which may keep next to nothing."""
DENSITIES = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
"""Upper bounds of the histogram of density."""
METRICS: dict[str, tuple[str, str, tuple[str, ...], tuple[float, ...]]] = {
    "prefill_chunks": ("Counter", "Chunks of prompts; sparse if any layer ran sparse.", ("mode",), ()),
    "dense_chunks": ("Counter", "Of these chunks the dense ones, by reason.", ("code", "reason"), ()),
    "prefill_tokens": ("Counter", "Tokens of these chunks.", ("mode",), ()),
    "prompts": ("Counter", "Prompts, by how they ran, and behind what in a cache.", ("mode", "behind"), ()),
    "cached_tokens": ("Counter", "Tokens in a cache before them, by how they were computed.", ("mode",), ()),
    "prefill_calls": ("Counter", "Calls, one per layer and chunk, by how they ran.", ("layers", "mode"), ()),
    "fallbacks": ("Counter", "Calls that ran dense, by reason.", ("layers", "code", "reason"), ()),
    "pairs": ("Counter", "Query-key pairs, computed and causal, with `measure`.", ("layers", "kind"), ()),
    "density": ("Histogram", "Share of the causal pairs computed, in measured calls.", ("layers",), DENSITIES),
    "recall": (
        *("Histogram", "Share of the attention mass that a head keeps, over sampled query rows, in measured calls."),
        *(("layers",), RECALLS),
    ),
    "row_p1": (
        *("Histogram", "Share that the 1st percentile of the sampled query rows keeps, in measured calls."),
        *(("layers",), ROW_RECALLS),
    ),
    "row_lowest": (
        *("Histogram", "Share that the lowest of the sampled query rows keeps, in measured calls."),
        *(("layers",), ROW_RECALLS),
    ),
    "low_recall_calls": ("Counter", "Measured calls with recall below strict_recall.", ("layers",), ()),
    "info": (
        *("Gauge", "1: what runs, the tokens from which the gate lets prompts run sparse, and those of a step."),
        *(("gate", "steps", "version"), ()),
    ),
}
"""By name: kind, what it says, its labels beside those of the owner, and a histogram's upper bounds."""
PREFIX = "sparseprefill:"
NO_LAYER = Why(Code.LAYER, "no layer can run sparse")
MERGED = {"Gauge": {"multiprocess_mode": "max"}}
"""Further arguments by kind: prometheus_client tells processes apart by a label of its own where it is not told to
take them together."""
log = logging.getLogger(__name__)


@frozen
class Owner:
    """Whose figures they are: the served model's name, the method, the worker's number, and the profile that requests
    ask for, empty for those that ask for none."""

    model: str = ""
    method: str = ""
    worker: str = "0"
    profile: str = ""


@define(eq=False)
class Tally:
    """Counts of one method of an engine in one process, told to Prometheus and to the summary in the log.

    measure: count every call's pairs, too (host sync a call). layers: of the model, 0 where that is not known. gate:
    tokens from which the gate lets prompts run sparse, as a label: "none" without a gate, "never" where it lets none.
    """

    measure: bool = False
    layers: int = 0
    owner: Owner = field(factory=Owner)
    gate: str = field(default="unknown", init=False)
    summary: Summary = field(factory=Summary)
    _pairs: dict[int, tuple[int, int]] = field(factory=dict, init=False)
    _children: dict[tuple[str, ...], Any] = field(factory=dict, init=False)
    _classes: dict[int, str] = field(factory=dict, init=False)
    _labels: set[str] = field(factory=set, init=False)

    def inform(self, steps: int) -> None:
        """Say what runs, in steps of so many tokens."""
        child = self._child("info", self.gate, str(steps), __version__)
        if child is not None:
            child.set(1)

    def chunk(self, tokens: int, keys: int) -> Chunk:
        """A prompt's chunk that begins: its tokens, and the keys of its calls."""
        return Chunk(self, tokens, keys)

    def ran(self, layer: int, call: Ran) -> None:
        """A layer ran sparse."""
        layers = self.layer_class(layer)
        self._count("prefill_calls", 1, layers, "sparse")
        if self.measure:
            done, allowed = call.done.count()
            self._count("pairs", done, layers, "computed")
            self._count("pairs", allowed, layers, "causal")
            before = self._pairs.get(layer, (0, 0))
            self._pairs[layer] = (before[0] + done, before[1] + allowed)
            if allowed:
                self._density(layers, call.sizes[2], done / allowed)

    def prompt(self, mode: Mode, before: Before | None) -> None:
        """A prompt ran in a mode. before: what a cache held of it; None for nothing, or where nobody tells."""
        self._count("prompts", 1, mode, "nothing" if before is None else before.mostly)
        for how, tokens in by_how(before).items():
            self._count("cached_tokens", tokens, how)

    def fallback(self, layer: int, why: Why) -> None:
        """A layer ran a request's chunk dense."""
        layers = self.layer_class(layer)
        self._count("prefill_calls", 1, layers, "dense")
        self._count("fallbacks", 1, layers, why.code, self._label(why.text))

    def dense(self, tokens: int, why: Why) -> None:
        """A chunk is through all layers, and none ran it sparse, for this reason."""
        self._settle(tokens, "dense")
        self._count("dense_chunks", 1, why.code, self._label(why.text))
        self.summary.dense(why.text)

    def sparse(self, tokens: int, keys: int, calls: int) -> None:
        """A chunk is through all layers, and so many ran it sparse. keys: of its calls."""
        self._settle(tokens, "sparse")
        self.summary.sparse(Kind(self.owner.profile, keys), calls)

    def recall(self, found: CallRecall) -> None:
        """The recall of a measured call is known, and its density."""
        layers = self.layer_class(found.layer)
        for kept in found.spread:
            self._observe("recall", kept, layers)
        self._observe("row_p1", found.row_p1, layers)
        self._observe("row_lowest", found.row_lowest, layers)
        if found.low:
            self._count("low_recall_calls", 1, layers)
        if not self.measure:  # else it has been told
            self._density(layers, found.keys, found.density)

    def layer_class(self, layer: int) -> str:
        """The neighbours that a layer is counted with, as ``0-7``: of each model about a quarter of its layers."""
        if layer not in self._classes:
            self._classes[layer] = self._class_of(layer)
        return self._classes[layer]

    def _class_of(self, layer: int) -> str:
        if not 0 <= layer < self.layers:
            return "other"
        nth = next(i for i in range(CLASSES) if layer < self.layers * (i + 1) // CLASSES)
        first, behind = (self.layers * (nth + more) // CLASSES for more in (0, 1))
        return str(first) if behind == first + 1 else f"{first}-{behind - 1}"

    def means(self) -> dict[int, float]:
        """Mean density by layer, over all measured calls."""
        return {layer: done / allowed for layer, (done, allowed) in self._pairs.items() if allowed}

    def _density(self, layers: str, keys: int, density: float) -> None:
        if 0 <= density <= 1:  # not a number where a call has padding alone
            self._observe("density", density, layers)
            self.summary.density(Kind(self.owner.profile, keys), density)

    def _label(self, reason: str) -> str:
        """The reason without its numbers; beyond `MOST`, which only a stranger's words reach, none by itself."""
        text = numberless(reason)  # each text of a label is a time series of its own
        if len(self._labels) < MOST:
            self._labels.add(text)
        return text if text in self._labels else OTHERS

    def _settle(self, tokens: int, mode: str) -> None:
        self._count("prefill_chunks", 1, mode)
        self._count("prefill_tokens", tokens, mode)

    def _count(self, name: str, amount: int, *labels: str) -> None:
        child = self._child(name, *labels)
        if child is not None:
            child.inc(amount)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        child = self._child(name, *labels)
        if child is not None:
            child.observe(value)

    def _child(self, name: str, *labels: str) -> Any:
        """The metric of these labels; None where there are no metrics."""
        key = (name, *labels)
        if key not in self._children:
            made, own = _metrics(), self.owner
            names: tuple[str, ...] = (*OWNER, *METRICS[name][2])
            given = dict(zip(names, (own.model, own.method, own.worker, own.profile, *labels), strict=True))
            self._children[key] = made[name].labels(**given) if made else None
        return self._children[key]


@frozen(eq=False)
class Served:
    """Service of a request: a method's session, which runs the calls of layers, and the counts of what it does."""

    session: Session
    tally: Tally


@define(eq=False)
class Chunk:
    """A chunk of a prompt on its way through the layers.

    tokens: its own; keys: of its calls. sparse, reasons: how many layers ran it sparse until now, and why the others
    did not. layers: how many will run it, as far as anybody knows: it is counted when the last of them is through, and
    where nobody knows at the beginning of the next step. settled: whether it has been. step: that it is part of. ended:
    told then whether it ran sparse.
    """

    tally: Tally
    tokens: int
    keys: int
    step: Step | None = field(default=None, init=False)
    layers: int = field(default=0, init=False)
    sparse: int = field(default=0, init=False)
    reasons: Counter[Why] = field(factory=Counter, init=False)
    settled: bool = field(default=False, init=False)
    ended: Callable[[bool], None] | None = field(default=None, init=False)

    def settle(self) -> None:
        """All layers are through: count it, once."""
        if self.settled:
            return
        self.settled = True
        if self.sparse:
            self.tally.sparse(self.tokens, self.keys, self.sparse)
        else:
            ((why, _),) = self.reasons.most_common(1) or [(NO_LAYER, 0)]
            self.tally.dense(self.tokens, why)
        ended, self.ended = self.ended, None
        if ended is not None:
            ended(self.sparse > 0)


@cache
def _metrics() -> dict[str, Any]:
    """One set a process; empty, with a warning, where they cannot be kept. prometheus_client comes with the servers."""
    try:
        import prometheus_client

        return {
            name: getattr(prometheus_client, kind)(
                PREFIX + name, about, [*OWNER, *labels], **({"buckets": bounds} if bounds else MERGED.get(kind, {}))
            )
            for name, (kind, about, labels, bounds) in METRICS.items()
        }
    except (ImportError, OSError, ValueError) as error:  # such as a PROMETHEUS_MULTIPROC_DIR that is not there
        log.warning("sparseprefill: no metrics: %s: %s", type(error).__name__, error)
        return {}
