"""How results reach the terminal: lines, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import typer

from sparseprefill.errors import told

from .columns import Column, fitted, width
from .describe import plain

if TYPE_CHECKING:
    from sparseprefill.registry import Registry


def to_json(value: Any) -> str:
    """JSON text; what JSON cannot hold becomes text."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False)


def write_json(value: Any) -> None:
    """JSON on standard output."""
    typer.echo(to_json(value))


def line(text: str, style: str = "") -> None:
    """One paragraph on standard output."""
    from rich.console import Console
    from rich.text import Text

    Console().print(Text(text, style=style))


def note(text: str) -> None:
    """One paragraph on standard error: what is not the result itself."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(text, style="dim"))


def broken(registry: Registry) -> None:
    """A note on every plugin that failed to load."""
    for record in registry.plugins():
        if record.error is not None:
            note(f"{record.source} failed to load and is left out: {told(record.error)}")


def figures(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    remarks: Iterable[str] = (),
    notes: str = "",
    *,
    words: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """A table of what was measured, all but its first column and those of words aligned to the right; below it what
    else is to be said of its rows, and, dim, what the columns mean. drop: as of `table`."""
    table(heads, rows, right=[head for head in heads[1:] if head not in words], title=title, drop=drop)
    for text in remarks:
        line(text)
    if notes:
        line(notes, style="dim")


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    title: str | None = None,
    drop: Sequence[str] = (),
) -> None:
    """A table on standard output; columns named in `right`, those of figures, are aligned to the right.

    On a terminal too narrow for it columns are left out, never a digit: first those that `drop` names, in its order,
    then from the right. The first column stays. A line below says which are missing. A file has room for all.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines, console = [*rows], Console()
    columns = [
        Column.of(index, head, [row[index] for row in lines], figures=index == 0 or head in right, measure=cell_len)
        for index, head in enumerate(heads)
    ]
    room = console.width
    if not console.file.isatty():
        room = max(room, width([one.least for one in columns]))
    kept = fitted(columns, room, drop)
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column, cells in kept:
        justify: Literal["left", "right"] = "right" if column.head in right else "left"
        made.add_column(column.head, justify=justify, no_wrap=column.least == column.most, width=cells, overflow="fold")
    for row in lines:
        made.add_row(*(Text(row[column.index]) for column, _ in kept))
    console.width = max(console.width, width([cells for _, cells in kept]))  # what stands beyond it would be cut off
    console.print(made)
    missing = [one.head for one in columns if one.head and one not in [column for column, _ in kept]]
    if missing:
        line(f"No room for {', '.join(missing)}: a wider terminal shows them, and so does a file.", style="dim")
