"""The keys in a server's cache, by how they were written: by a method, or with every key.

A prompt that begins behind a cached prefix goes on as that was computed (`Route`). Servers differ in what they tell of
their pages, so each adapter has a `Written` of its own; all of them are on the host, and are told once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import define, field, frozen

from sparseprefill.breakeven.before import Before

from .requests import Row

Write = Callable[[str], None]
"""Told how a row's chunk was computed, once that is known: by the method of this name, or, where that is empty, with
every key."""
UNTOLD = "the server does not tell which keys they are"
STORE = "{name} may have brought them"
LOST = "it is not known any more, after {error}"


class Written(Protocol):
    """Memory of what each part of the cache was written by."""

    def before(self, row: Row) -> Before:
        """Tokens before a row, by how they were computed; the row is the first of its request."""
        ...

    def writing(self, row: Row) -> Write:
        """A row is computed in this step. What it returns is called when that is over, which may be in a later one."""
        ...


@frozen(eq=False)
class Unwritten:
    """A cache of which nobody knows how it was written, and why."""

    why: str

    def before(self, row: Row) -> Before:
        """See `Written`."""
        return Before(unknown=row.start, why=self.why)

    def writing(self, row: Row) -> Write:
        """See `Written`."""
        return nowhere


def nowhere(method: str) -> None:
    """In the place of a `Write` of a row whose keys nobody can tell."""


@define(eq=False)
class Methods:
    """Numbers of methods, as small as can be: 0 for what nobody knows, 1 for every key, then by when they were met."""

    UNKNOWN, DENSE, LAST = 0, 1, 255
    _names: list[str] = field(factory=list, init=False)

    def number(self, method: str) -> int:
        """The number of a method; of nobody for more than there is room for."""
        if not method:
            return self.DENSE
        if method not in self._names:
            if len(self._names) == self.LAST - self.DENSE:
                return self.UNKNOWN
            self._names.append(method)
        return self._names.index(method) + self.DENSE + 1

    def before(self, tokens: Sequence[int], why: str = "") -> Before:
        """tokens: how many there are of each number. why: some are nobody's."""
        found = [*tokens, 0, 0]
        sparse = {name: count for name, count in zip(self._names, found[2:], strict=False) if count}
        return Before(
            sparse=sum(sparse.values()),
            dense=found[self.DENSE],
            unknown=found[self.UNKNOWN],
            methods=tuple(sparse),
            why=why if found[self.UNKNOWN] else "",
        )
