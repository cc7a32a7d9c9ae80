"""The record of an attached model: one entry a layer, with the reason for every dense fallback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Literal

from attrs import field, frozen

from sparseprefill.breakeven.gate import OFF, remedy, with_remedy

from .kinds import Kinds, kind_of

Mode = Literal["sparse", "window", "dense", "unused"]


@frozen(kw_only=True)
class LayerRecall:
    """Attention mass that one layer kept of sampled query rows (`metrics.watched_recall`), in all prefills measured.

    mean: over heads and the rows that are spread over a call. least, head: of the head that kept least, over these
    rows or over the calls' last ones. row_p1: 1st percentile of the rows that are spread over a call, of all heads, to
    the next 0.005 above. row_lowest: what the lowest row kept, of these or of the calls' last ones. calls: how many
    were measured. low_calls: of them, in which a head kept less than `strict_recall`.
    """

    mean: float
    least: float
    head: int
    row_p1: float
    row_lowest: float
    calls: int
    low_calls: int = 0

    def __str__(self) -> str:
        rows = f"rows: 1st percentile {self.row_p1:.3f}, lowest {self.row_lowest:.3f}"
        return f"recall {self.mean:.3f} (lowest {self.least:.3f}, head {self.head}; {rows})"


@frozen(kw_only=True)
class LayerReport:
    """The record of one attention layer: calls, densities, recall, and why calls ran dense.

    mode: how its last prefill call ran: the method's mask (sparse), an exact sliding window (window), the host's own
    attention (dense), or not yet (unused). sparse_calls, window_calls, dense_calls: how many calls ran so.
    cross_calls: calls of the layer's cross attention, which is no prefill and always the host's own.
    reasons: why calls were dense, with counts; those that differ in numbers alone are one, with the span of each
    (``64 to 4096``). density: computed / causal pairs over the last prefill, all its chunks;
    None where that was not sparse, or could not be counted: in a CUDA graph's capture, or for lack of memory.
    mean_density: over all sparse calls, if each was measured.
    skipped: of the pairs that the masks of that prefill held, the share that was left out by their logits and is not in
    density; None where nothing could be (`SkipSoftmax`), or it is not known.
    in_16_bits: query heads that stayed in 16 bits in that prefill's last call in 8, since their error was beyond the
    bound; None where no call was in 8.
    recall: of the prefills in which it was measured; None where it was in none.
    batch, query_length, key_length: of the last call, in rows and tokens.
    """

    layer: int
    mode: Mode = "unused"
    sparse_calls: int = 0
    window_calls: int = 0
    dense_calls: int = 0
    cross_calls: int = 0
    reasons: Mapping[str, int] = field(factory=dict)
    density: float | None = None
    mean_density: float | None = None
    skipped: float | None = None
    in_16_bits: tuple[int, ...] | None = None
    recall: LayerRecall | None = None
    batch: int = 0
    query_length: int = 0
    key_length: int = 0

    @property
    def calls(self) -> int:
        """Prefill calls of every mode; cross attention is none."""
        return self.sparse_calls + self.window_calls + self.dense_calls

    def __str__(self) -> str:
        return self.line()

    def line(self, elsewhere: Collection[tuple[str, ...]] = ()) -> str:
        """In words. elsewhere: kinds of reasons that are told for several layers at once."""
        if self.mode == "unused":
            return f"layer {self.layer:>3}  unused"
        sizes = f"{self.batch} x {self.query_length} queries, {self.key_length} keys"
        text = f"layer {self.layer:>3}  {self.mode:<6}  {self.calls:>3} calls  {sizes}"
        if self.mode == "sparse":
            text += "  density " + ("not counted" if self.density is None else f"{self.density:.3f}")
        if self.mean_density is not None:
            text += f" (mean {self.mean_density:.3f})"
        if self.skipped is not None:
            text += f"  skipped {self.skipped:.3f}"
        if self.in_16_bits is not None:
            stayed = f", heads {', '.join(map(str, self.in_16_bits))} in 16" if self.in_16_bits else ""
            text += f"  8 bits{stayed}"
        if self.recall is not None:
            text += f"  {self.recall}"
        if self.cross_calls:
            text += f"  and {self.cross_calls} of cross attention"
        own = {reason: count for reason, count in self.reasons.items() if kind_of(reason) not in elsewhere}
        why = "; ".join(f"{reason} ({count}x)" for reason, count in own.items())
        return f"{text}  dense: {why}" if why else text


@frozen(kw_only=True)
class Report:
    """An attached model.

    method: the pipeline's name. host: what it is attached to. implementation: the host's own attention, which serves
    decoding and every fallback. min_query: query rows from which a call is prefill. grain: tokens at whose multiples a
    prompt may be cut into chunks, or None. tail: last query rows of a prompt, or of each chunk where the host does not
    know the prompt's end, that get every key. short_forwards: forwards with fewer rows, all dense: decoding steps and
    short prompts. layers: in order of their index. notes: what else is worth knowing, with counts, as reasons are.
    gate: the tables by which calls were judged, and whether one has no figures of the method; empty if none was.
    pays_from: once it left a call dense, tokens from which on it lets whole prompts run sparse, to a thirtieth; None
    where it never does, and in servers, whose log tells it for their steps.
    kernels: how many calls each kernel computed, by its name and, in brackets, why no faster one did (`plan.Kernel`); a
    call in parts counts for each kernel that it met. prefills: that ran sparse in some layer. measured_prefills: of
    them, of which recall was to be measured. strict_recall: below which calls count as low; None where nothing was
    asked for. gated: of the reasons those that the gate gave, with counts of calls. prompts: by how they ran, and
    behind what a cache held of them ("sparse behind dense"). cached: those tokens, by how they were computed
    ("sparse", "dense", "unknown"). off: how the host is told to have no gate.
    """

    method: str
    host: str
    implementation: str
    min_query: int
    grain: int | None = None
    tail: int = 0
    short_forwards: int = 0
    layers: tuple[LayerReport, ...] = ()
    notes: Mapping[str, int] = field(factory=dict)
    gate: str = ""
    pays_from: int | None = None
    kernels: Mapping[str, int] = field(factory=dict)
    prefills: int = 0
    measured_prefills: int = 0
    strict_recall: float | None = None
    gated: Mapping[str, int] = field(factory=dict)
    prompts: Mapping[str, int] = field(factory=dict)
    cached: Mapping[str, int] = field(factory=dict)
    off: str = OFF

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Reasons for dense prefill calls, summed over the layers."""
        total = Kinds()
        for layer in self.layers:
            total.update(layer.reasons)
        return total.counts()

    @property
    def density(self) -> float | None:
        """Mean density of the layers whose last prefill was sparse, as far as it is known; None if there is none."""
        known = [layer.density for layer in self.layers if layer.density is not None]
        return sum(known) / len(known) if known else None

    @property
    def recall(self) -> float | None:
        """Mean recall of the layers in which it was measured; None if there is none."""
        known = [layer.recall.mean for layer in self.layers if layer.recall is not None]
        return sum(known) / len(known) if known else None

    @property
    def least_recall(self) -> tuple[float, int, int] | None:
        """Recall, layer and head of the head that keeps least; None if none was measured."""
        known = [(one.recall.least, one.layer, one.recall.head) for one in self.layers if one.recall is not None]
        return min(known, default=None)

    @property
    def row_p1(self) -> tuple[float, int] | None:
        """1st percentile of a layer's sampled rows, and the layer in which it is lowest; None if none was measured."""
        known = [(one.recall.row_p1, one.layer) for one in self.layers if one.recall is not None]
        return min(known, default=None)

    @property
    def row_lowest(self) -> tuple[float, int] | None:
        """Recall of the row that keeps least, and its layer; None if none was measured."""
        known = [(one.recall.row_lowest, one.layer) for one in self.layers if one.recall is not None]
        return min(known, default=None)

    @property
    def idle(self) -> str:
        """Reason for which the method was never asked, where the gate found every call too small, and what to do about
        that; empty where something ran sparse, or the gate had no part in it."""
        if not self.gated or any(layer.sparse_calls for layer in self.layers):
            return ""
        calls, why = sum(self.gated.values()), with_remedy("; ".join(self.gated), self.off)
        return f"nothing ran sparse, since the gate found {calls} calls too small: {why}"

    def __str__(self) -> str:
        idle = self.idle
        gated = {kind_of(reason) for reason in self.gated} if idle else set()
        shared = {one: at for one, at in self._shared().items() if kind_of(one) not in gated}
        told = gated | {kind_of(reason) for reason in shared}
        notes = [one for one in self.notes.items() if not idle or remedy(self.off) not in one[0]]
        grain = "no grain" if self.grain is None else f"grain {self.grain} tokens"
        tail = f"; dense tail {self.tail} rows" if self.tail else ""
        lines = [
            f"{self.method} on {self.host} (dense: {self.implementation}; {grain}{tail})",
            *(layer.line(told) for layer in self.layers),
            *(f"dense in {n} layers: {one} ({count}x)" for one, (n, count) in shared.items()),
            *([idle] if idle else []),
            *self._recall_lines(),
            f"dense by length (fewer than {self.min_query} query rows): {self.short_forwards} forwards",
            *([f"dense by break-even: {self.gate}{self._from}"] if self.gate else []),
            *([f"prompts: {_counted(self.prompts)}"] if self.prompts else []),
            *([f"cached tokens before them: {_counted(self.cached)}"] if self.cached else []),
            *(f"kernel: {kernel}, {count} calls" for kernel, count in self.kernels.items()),
            *(f"note: {note} ({count}x)" for note, count in notes),
        ]
        return "\n".join(lines)

    @property
    def _from(self) -> str:
        if not self.gated or self.pays_from is None:
            return ""
        return f", by which whole prompts run sparse from some {self.pays_from:,} tokens on"

    def _shared(self) -> dict[str, tuple[int, int]]:
        """Reasons that several layers have, which are told once: in how many layers, and how many calls."""
        layers = Counter(kind_of(reason) for layer in self.layers for reason in layer.reasons)
        return {one: (n, count) for one, count in self.fallbacks.items() if (n := layers[kind_of(one)]) > 1}

    def _recall_lines(self) -> list[str]:
        """The measured recall; no line where none was measured."""
        mean, found, first, lowest = self.recall, self.least_recall, self.row_p1, self.row_lowest
        if mean is None or found is None or first is None or lowest is None:
            return []
        least, layer, head = found
        of = f"{self.measured_prefills} of {self.prefills} prefills"
        lines = [
            f"recall in {of}: {mean:.3f}, lowest {least:.3f} (layer {layer}, head {head})",
            f"recall of rows: 1st percentile {first[0]:.3f} (layer {first[1]}), "
            f"lowest {lowest[0]:.3f} (layer {lowest[1]})",
        ]
        if self.strict_recall is not None:
            known = [one.recall for one in self.layers if one.recall is not None]
            low, calls = sum(one.low_calls for one in known), sum(one.calls for one in known)
            lines.append(f"recall below {self.strict_recall:g}: {low} of {calls} calls")
        return lines


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(found.items()))
