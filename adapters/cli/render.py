"""How results reach the terminal: lines, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sparseprefill.errors import told
from sparseprefill.registry import Registry

from .describe import plain

MEASURED = 1000
"""Columns in which a table's own width is measured."""


def to_json(value: Any) -> str:
    """JSON text; what JSON cannot hold becomes text."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False)


def write_json(value: Any) -> None:
    """JSON on standard output."""
    typer.echo(to_json(value))


def line(text: str, style: str = "") -> None:
    """One paragraph on standard output."""
    Console().print(Text(text, style=style))


def note(text: str) -> None:
    """One paragraph on standard error: what is not the result itself."""
    Console(stderr=True).print(Text(text, style="dim"))


def broken(registry: Registry) -> None:
    """A note on every plugin that failed to load."""
    for record in registry.plugins():
        if record.error is not None:
            note(f"{record.source} failed to load and is left out: {told(record.error)}")


def figures(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], remarks: Iterable[str] = (), notes: str = ""
) -> None:
    """A table of what was measured, all but its first column aligned to the right; below it what else is to be said of
    its rows, and, dim, what the columns mean."""
    table(heads, rows, right=heads[1:], title=title)
    for text in remarks:
        line(text)
    if notes:
        line(notes, style="dim")


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), title: str | None = None
) -> None:
    """A table on standard output; columns named in `right` are aligned to the right."""
    made, lines = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False), [*rows]
    for index, head in enumerate(heads):
        narrow = index == 0 or head in right
        # What is narrow is never cut: a line longer than the terminal is better than half a number.
        least = max(cell_len(text) for text in (head, *(row[index] for row in lines))) if narrow else None
        justify: Literal["left", "right"] = "right" if head in right else "left"
        made.add_column(head, justify=justify, no_wrap=narrow, min_width=least, overflow="fold")
    for row in lines:
        made.add_row(*(Text(cell) for cell in row))
    console = Console()
    console.width = max(
        console.width, Measurement.get(console, console.options.update(max_width=MEASURED), made).minimum
    )
    console.print(made)
