"""Results on the terminal: one kind of table for everything, lines, notes and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import typer
from attrs import frozen

from sparseprefill.errors import told

if TYPE_CHECKING:
    from sparseprefill.registry import Registry

Item = TypeVar("Item")
COMFORT = 16
"""Cells that a column of words wants at least, so that it reads as text and not as a tower."""
LONGEST = 40
"""Cells of the longest word that is never broken."""


@frozen
class Column(Generic[Item]):
    """A table's column: one thing of its items. words: it is text, which may go on in the next line; else figures."""

    head: str
    cell: Callable[[Item], str]
    words: bool = False


@frozen(kw_only=True)
class Table:
    """Rows of texts under heads, for a terminal, a page or a file.

    words: heads of columns of text; the others, but the first, hold figures. drop: columns that leave first where there
    is no room, in this order. remarks: what else is to be said of the rows. notes: what the columns mean.
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

    def fitted(self, room: int, measure: Callable[[str], int] = len) -> dict[int, int]:
        """By the index of each column to show, how wide it is. measure: cells of a text in the terminal.

        Where room, in cells, is too little for all columns, some leave: those that `drop` names, in its order, then
        from the right. The first one stays. Words get what is left over, the narrowest column first.
        """
        spans = [self._span(i, measure) for i in range(len(self.heads))]
        kept = list(range(len(spans)))
        named = [self.heads.index(head) for head in self.drop if head in self.heads[1:]]
        leaving = [*named, *(i for i in reversed(kept[1:]) if i not in named)]
        while leaving and width(spans[i][0] for i in kept) > room:
            kept.remove(leaving.pop(0))
        cells = {i: spans[i][0] for i in kept}
        for _ in range(room - width(cells.values())):
            growing = [i for i in kept if cells[i] < spans[i][1]]
            if growing:
                cells[min(growing, key=cells.__getitem__)] += 1
        return cells

    def _span(self, index: int, measure: Callable[[str], int]) -> tuple[int, int]:
        """The fewest cells that a column can do with, and all it could use: the same for figures, which never break."""
        texts = (self.heads[index], *(row[index] for row in self.rows))
        most = max((measure(line) for text in texts for line in text.split("\n")), default=0)
        if index == 0 or self.heads[index] not in self.words:
            return most, most
        word = max((measure(word) for text in texts for word in text.split()), default=0)
        return max(min(word, LONGEST), min(most, COMFORT)), most


def width(cells: Iterable[int]) -> int:
    """Cells of a table with columns of these widths: three between two of them, and one at each end."""
    listed = [*cells]
    return sum(listed) + 3 * len(listed) - 1


def show(table: Table) -> None:
    """A table on standard output; below it its remarks and, dim, its notes.

    On a terminal too narrow for it columns are left out, never a digit (`Table.fitted`), and a line below says which
    are missing. A file has room for all.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    console = Console()
    least = width(table._span(i, cell_len)[0] for i in range(len(table.heads)))
    cells = table.fitted(console.width if console.file.isatty() else max(console.width, least), cell_len)
    made = Drawn(box=box.SIMPLE_HEAD, title=table.title, title_justify="left", pad_edge=False)
    for i, wide in cells.items():
        words = table.heads[i] in table.words
        made.add_column(
            table.heads[i], justify="left" if words or not i else "right", no_wrap=not words, width=wide,
            overflow="fold",
        )  # fmt: skip
    for row in table.rows:
        made.add_row(*(Text(row[i]) for i in cells))
    console.width = max(console.width, width(cells.values()))  # what stands beyond it would be cut off
    console.print(made)
    missing = [head for i, head in enumerate(table.heads) if head and i not in cells]
    if missing:
        line(f"No room for {', '.join(missing)}: a wider terminal shows them, and so does a file.", style="dim")
    for text in table.remarks:
        line(text)
    if table.notes:
        line(table.notes, style="dim")


def line(text: str, style: str = "", *, error: bool = False, whole: bool = False) -> None:
    """One paragraph on standard output, or on standard error. whole: unbroken, as paths and code to paste are."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=error).print(Text(text, style=style), soft_wrap=whole)


def note(text: str) -> None:
    """One paragraph on standard error: what is not the result itself."""
    line(text, "dim", error=True)


def broken(registry: Registry) -> None:
    """A note on every plugin that failed to load."""
    for record in registry.plugins():
        if record.error is not None:
            note(f"{record.source} failed to load and is left out: {told(record.error)}")


def plain(value: Any) -> Any:
    """A value that JSON can hold: what it cannot becomes text, infinity ``"inf"``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def to_json(value: Any) -> str:
    """JSON text; what JSON cannot hold becomes text."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False)


def write_json(value: Any) -> None:
    """JSON on standard output."""
    typer.echo(to_json(value))
