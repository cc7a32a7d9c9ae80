"""Which columns of a table a terminal has room for, and how wide each is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

COMFORT = 16
"""Cells that a column of words wants at least, so that it reads as text and not as a tower."""
LONGEST = 40
"""Cells of the longest word that is never broken."""


@frozen
class Column:
    """One column: where it stands in a row, its head, the fewest cells it can do with, and all it could use.

    Figures are never broken, so both are the same; words go on in the next line.
    """

    index: int
    head: str
    least: int
    most: int

    @classmethod
    def of(cls, index: int, head: str, cells: Sequence[str], *, figures: bool, measure: Callable[[str], int]) -> Column:
        """The column of these cells. measure: how wide a text is, in cells of the terminal."""
        texts = (head, *cells)
        most = max((measure(line) for text in texts for line in text.split("\n")), default=0)
        if figures:
            return cls(index, head, most, most)
        word = max((measure(word) for text in texts for word in text.split()), default=0)
        return cls(index, head, max(min(word, LONGEST), min(most, COMFORT)), most)


def width(widths: Sequence[int]) -> int:
    """Cells of a table with such columns: three between two of them, and one at each end."""
    return sum(widths) + 3 * len(widths) - 1


def fitted(columns: Sequence[Column], room: int, drop: Sequence[str] = ()) -> list[tuple[Column, int]]:
    """The columns to show, in their order, and how wide each is.

    Where room, in cells, is too little for all of them, columns leave: those that `drop` names, in its order, then from
    the right. The first one stays. Words get what is left over, the narrowest column first.
    """
    kept = list(columns)
    named = [one for head in drop for one in columns[1:] if one.head == head]
    leaving = [*named, *(one for one in reversed(columns[1:]) if one not in named)]
    while leaving and width([one.least for one in kept]) > room:
        kept.remove(leaving.pop(0))
    widths = {one.index: one.least for one in kept}
    free = room - width(list(widths.values()))
    while free > 0:
        growing = [one for one in kept if widths[one.index] < one.most]
        if not growing:
            break
        widths[min(growing, key=lambda one: widths[one.index]).index] += 1
        free -= 1
    return [(one, widths[one.index]) for one in kept]
