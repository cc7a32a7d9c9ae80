"""Rows as Markdown tables, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable

from sparseprefill.adapters.cli.render import Column, Table

from lab import files

from .measure import Row
from .report import COLUMNS, dense_text, grouped, title

LONG = {"mask": "estimate", "eff.": "efficiency"}
"""Heads where there is room."""
LABEL: Column[Row] = Column("what", lambda row: row.case.label)
EXTRA: Column[Row] = Column("extra MiB", lambda row: "" if row.extra is None else f"{row.extra / 2**20:.0f}")
"""Most memory held beyond inputs and result."""


def markdown(rows: Iterable[Row]) -> str:
    """A table for each title that rows have in common."""
    columns = (LABEL, *COLUMNS, EXTRA)
    made = [
        Table.of(columns, one, lambda row: row.error, title=title(one[0]), remarks=[dense_text(one)])
        for one in grouped(list(rows))
    ]
    return "\n".join(files.markdown(one, LONG) for one in made)
