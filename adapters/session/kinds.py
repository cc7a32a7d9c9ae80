"""Texts with counts, by kind: of two that differ in their numbers alone, one line is kept, and how far the numbers go.
And codes of reasons, which are few, and the same for good, where the texts are sentences.

A server, or a notebook that runs for days, meets as many lengths and positions as there are; what it says of them must
not grow with that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from attrs import define, field, frozen

from sparseprefill.errors import NUMBER

MOST = 200
"""Kinds that are kept; texts of a third party may differ in any way."""
OTHERS = f"texts of other kinds, beyond the first {MOST}"


class Code(StrEnum):
    """Reasons for which a call, or a prompt's chunk, ran dense; docs/vllm-operate.md says what each means."""

    SHORT = "short"
    OFF = "off"
    NO_PROFILE = "no_profile"
    UNKNOWN = "unknown"
    GATE = "gate"
    PROFILE = "profile"
    LAYERS = "layers"
    LAYER = "layer"
    REQUEST = "request"
    UNSUPPORTED = "unsupported"
    MEMORY = "memory"
    ERROR = "error"


@frozen
class Why:
    """Reason for which a call ran dense. code: for panels. text: in words, for people."""

    code: Code
    text: str


@define(eq=False)
class _Kind:
    """parts: what stands between the numbers. first, last: the least and the greatest text in each place."""

    parts: tuple[str, ...]
    first: list[str]
    last: list[str]
    count: int = 0

    def __str__(self) -> str:
        spans = [a if a == b else f"{a} to {b}" for a, b in zip(self.first, self.last, strict=True)]
        return "".join(x for pair in zip(self.parts, (*spans, ""), strict=True) for x in pair)


@define(eq=False)
class Kinds:
    """Counts of texts by kind."""

    _kinds: dict[tuple[str, ...], _Kind] = field(factory=dict, init=False)
    _seen: dict[str, _Kind] = field(factory=dict, init=False)

    def add(self, text: str, count: int = 1) -> bool:
        """Count a text. Whether it is the first of its kind."""
        kind = self._seen.get(text) or self._place(text)
        kind.count += count
        return kind.count == count

    def update(self, texts: Mapping[str, int] | Iterable[str]) -> None:
        """Count several."""
        for text, count in texts.items() if isinstance(texts, Mapping) else ((text, 1) for text in texts):
            self.add(text, count)

    def counts(self) -> dict[str, int]:
        """Each kind as one text, with the span of numbers that came in each place."""
        return {str(kind): kind.count for kind in self._kinds.values()}

    def __contains__(self, text: str) -> bool:
        """True if one of its kind was counted."""
        return text in self._seen or kind_of(text) in self._kinds

    def __len__(self) -> int:
        return len(self._kinds)

    def _place(self, text: str) -> _Kind:
        """The kind of a text that was not seen of late; the texts remembered are few, whatever comes."""
        parts, first, last = _cut(text)
        if parts not in self._kinds and len(self._kinds) >= MOST:
            parts, first, last = _cut(OTHERS)
        kind = self._kinds.get(parts)
        if kind is None:
            kind = self._kinds[parts] = _Kind(parts, first, last)
        else:
            kind.first = [min(pair, key=_value) for pair in zip(kind.first, first, strict=True)]
            kind.last = [max(pair, key=_value) for pair in zip(kind.last, last, strict=True)]
        if len(self._seen) >= MOST:
            self._seen.clear()
        self._seen[text] = kind
        return kind


def kind_of(text: str) -> tuple[str, ...]:
    """The common part of texts of one kind: the words between their numbers."""
    return _cut(text)[0]


def _cut(text: str) -> tuple[tuple[str, ...], list[str], list[str]]:
    parts, first, last, at = [], [], [], 0
    for found in NUMBER.finditer(text):
        parts.append(text[at : found.start()])
        first.append(found[1])
        last.append(found[2] or found[1])
        at = found.end()
    return (*parts, text[at:]), first, last


def _value(number: str) -> float:
    return int(number, 16) if number.startswith("0x") else float(number.replace(",", ""))
