"""One table for all that is shown: columns, rows, what is to be said of them, and what leaves a narrow terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from attrs import frozen

Item = TypeVar("Item")
COMFORT = 16
"""Cells that a column of words wants at least, so that it reads as text and not as a tower."""
LONGEST = 40
"""Cells of the longest word that is never broken."""


@frozen
class Column(Generic[Item]):
    """How a table shows one thing of its items. words: it is text, which may go on in the next line; else figures."""

    head: str
    cell: Callable[[Item], str]
    words: bool = False


@frozen(kw_only=True)
class Table:
    """Rows of texts under heads. words: heads of columns of text; the others, but the first, hold figures.

    drop: columns that leave first where there is no room, in this order. remarks: what else is to be said of the rows.
    notes: what the columns mean.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    words: Sequence[str] = ()
    drop: Sequence[str] = ()
    remarks: Sequence[str] = ()
    notes: str = ""

    @classmethod
    def of(
        cls,
        columns: Sequence[Column[Item]],
        items: Iterable[Item],
        failed: Callable[[Item], Any] = lambda item: False,
        **more: Any,
    ) -> Table:
        """A row for each item. Columns of figures that no item has anything in are left out.

        failed: whether an item has no figures; then the first of them says so. more: other fields.
        """
        listed, lead = [*items], [*columns[:1], *(one for one in columns[1:] if one.words)]
        first = next((one for one in columns if one not in lead), None)

        def cell(one: Column[Item], item: Item) -> str:
            if failed(item) and one not in lead:
                return "failed" if one is first else ""
            return one.cell(item)

        rows = [[cell(one, item) for one in columns] for item in listed]
        shown = [i for i, one in enumerate(columns) if one in lead or any(row[i] for row in rows)]
        return cls(
            heads=[columns[i].head for i in shown],
            rows=[[row[i] for i in shown] for row in rows],
            words=[one.head for one in lead[1:]],
            **more,
        )

    def markdown(self, heads: Mapping[str, str] = MappingProxyType({})) -> str:
        """Title, remarks and rows. heads: other words for some."""
        return "\n".join([f"### {self.title}", "", *[f"{text}." for text in self.remarks], "", *self.grid(heads), ""])

    def grid(self, heads: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """Lines of Markdown for the rows alone; all columns but the first are aligned to the right."""
        ruler = f"| --- |{' ---: |' * (len(self.heads) - 1)}"
        return [_line([heads.get(head, head) for head in self.heads]), ruler, *map(_line, self.rows)]

    def fitted(self, room: int, measure: Callable[[str], int]) -> list[tuple[Fit, int]]:
        """The columns to show in so many cells, and how wide each is. measure: cells of a text."""
        columns = [
            Fit.of(i, head, [row[i] for row in self.rows], figures=i == 0 or head not in self.words, measure=measure)
            for i, head in enumerate(self.heads)
        ]
        return fitted(columns, room, self.drop)


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


@frozen
class Fit:
    """Where a column stands in a row, its head, the fewest cells it can do with, and all it could use.

    Figures are never broken, so both are the same; words go on in the next line.
    """

    index: int
    head: str
    least: int
    most: int

    @classmethod
    def of(cls, index: int, head: str, cells: Sequence[str], *, figures: bool, measure: Callable[[str], int]) -> Fit:
        """Those of a column with these cells. measure: how wide a text is, in cells of the terminal."""
        texts = (head, *cells)
        most = max((measure(line) for text in texts for line in text.split("\n")), default=0)
        if figures:
            return cls(index, head, most, most)
        word = max((measure(word) for text in texts for word in text.split()), default=0)
        return cls(index, head, max(min(word, LONGEST), min(most, COMFORT)), most)


def width(widths: Sequence[int]) -> int:
    """Cells of a table with such columns: three between two of them, and one at each end."""
    return sum(widths) + 3 * len(widths) - 1


def fitted(columns: Sequence[Fit], room: int, drop: Sequence[str] = ()) -> list[tuple[Fit, int]]:
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
