"""A batch of the host in parts: each request that runs sparse on its own, the rest in runs for the host's attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from attrs import define, field, frozen

from ..session.repeat import Repeat
from ..session.session import Fallback, Prefill
from .requests import Row
from .tally import Chunk, Served


@define(eq=False)
class Part:
    """Requests `first` to `last` (exclusive) of a batch, whose query rows are `begin` to `end`.

    row, prefill, chunk: of the one request of a part that runs sparse; None for a part that the host computes. served:
    what runs it. reason: why such a request stays dense in all layers, or None. make: the host's own metadata for it.
    """

    first: int
    last: int
    begin: int
    end: int
    row: Row | None = None
    prefill: Prefill | None = None
    chunk: Chunk | None = None
    served: Served | None = None
    reason: str | None = None
    make: Callable[[], Any] | None = None
    _made: list[Any] = field(factory=list, init=False)

    def metadata(self) -> Any:
        """The host's own metadata for this part, made once, when the first layer needs it."""
        if not self._made and self.make is not None:
            self._made.append(self.make())
        return self._made[0]


@frozen(eq=False)
class Repeated:
    """Parts that one service runs, and what repeats them."""

    served: Served
    repeat: Repeat
    parts: tuple[Part, ...]


@define(eq=False)
class Known:
    """Outcome of a step's parts in one layer: what repeats those that ran sparse, and those that are left to the host,
    with why it was so where a request asked. It holds for the layers of one kind (`Runtime.kind`)."""

    repeated: list[Repeated] = field(factory=list)
    left: list[tuple[Part, Fallback | None]] = field(factory=list)

    def add(self, served: Served, repeats: Sequence[Repeat], parts: Sequence[Part], sparse: int) -> None:
        """Those of the parts that ran sparse, so many, if all of them can be repeated. parts: of all that were asked
        together, by which a `Repeat` counts its own."""
        if sum(len(one.places) for one in repeats) == sparse:
            self.repeated += [Repeated(served, one, tuple(parts[i] for i in one.places)) for one in repeats]

    def others(self, parts: Sequence[Part]) -> list[Part]:
        """The parts of which nothing is known."""
        count = len(self.left) + sum([len(one.parts) for one in self.repeated])
        if count == len(parts):
            return []
        held = {id(part) for part, _ in self.left} | {id(part) for one in self.repeated for part in one.parts}
        return [part for part in parts if id(part) not in held]


class Batch(list[Part]):
    """The parts of a step. known: what they came to, by kind of layer."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        super().__init__(parts)
        self.known: dict[Hashable, Known] = {}


def runs(sparse: Iterable[int], count: int) -> list[tuple[int, int]]:
    """Half-open ranges of `count` rows: a sparse row alone, neighbours of the rest together. sparse: ascending."""
    alone = tuple(sparse)
    return sorted([*((i, i + 1) for i in alone), *gaps(alone, count)])


def gaps(rows: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Half-open ranges of those of `count` rows that are not among `rows`, which ascend."""
    return [(a, b) for a, b in zip((0, *(i + 1 for i in rows)), (*rows, count), strict=True) if a < b]
