"""A batch of the host in parts: each request that runs sparse on its own, the rest in runs for the host's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field

from ..session.session import Fallback, Prefill
from .requests import Row
from .tally import Chunk, Served


@define(eq=False)
class Part:
    """Requests `first` to `last` (exclusive) of a batch, whose query rows are `begin` to `end`.

    row, prefill, chunk: of the one request of a part that runs sparse; None for a part that the host computes. served:
    what runs it. reason: why such a request stays dense in all layers, or None. small: what a layer found of its sizes
    in this step, which holds for the other layers. make: the host's own metadata for it.
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
    small: Fallback | None = None
    make: Callable[[], Any] | None = None
    _made: list[Any] = field(factory=list, init=False)

    def metadata(self) -> Any:
        """The host's own metadata for this part, made once, when the first layer needs it."""
        if not self._made and self.make is not None:
            self._made.append(self.make())
        return self._made[0]


def runs(sparse: Iterable[int], count: int) -> list[tuple[int, int]]:
    """Half-open ranges of `count` rows: a sparse row alone, neighbours of the rest together. sparse: ascending."""
    alone = tuple(sparse)
    return sorted([*((i, i + 1) for i in alone), *gaps(alone, count)])


def gaps(rows: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Half-open ranges of those of `count` rows that are not among `rows`, which ascend."""
    return [(a, b) for a, b in zip((0, *(i + 1 for i in rows)), (*rows, count), strict=True) if a < b]
