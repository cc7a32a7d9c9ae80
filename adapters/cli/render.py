"""How results reach the terminal: tables, lines and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from sparseprefill.errors import told

from ..table import Table, width

if TYPE_CHECKING:
    from sparseprefill.registry import Registry


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


def show(table: Table) -> None:
    """A table on standard output; below it its remarks and, dim, its notes.

    On a terminal too narrow for it columns are left out, never a digit: first those that `drop` names, then from the
    right. The first column stays. A line below says which are missing. A file has room for all.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    console = Console()
    room = console.width
    if not console.file.isatty():
        room = max(room, width([one.least for one, _ in table.fitted(1 << 30, cell_len)]))
    kept = table.fitted(room, cell_len)
    made = Drawn(box=box.SIMPLE_HEAD, title=table.title, title_justify="left", pad_edge=False)
    for column, cells in kept:
        right = column.index > 0 and column.head not in table.words
        made.add_column(
            column.head,
            justify="right" if right else "left",
            no_wrap=column.least == column.most,
            width=cells,
            overflow="fold",
        )
    for row in table.rows:
        made.add_row(*(Text(row[column.index]) for column, _ in kept))
    console.width = max(console.width, width([cells for _, cells in kept]))  # what stands beyond it would be cut off
    console.print(made)
    shown = [column.index for column, _ in kept]
    missing = [head for i, head in enumerate(table.heads) if head and i not in shown]
    if missing:
        line(f"No room for {', '.join(missing)}: a wider terminal shows them, and so does a file.", style="dim")
    for text in table.remarks:
        line(text)
    if table.notes:
        line(table.notes, style="dim")
