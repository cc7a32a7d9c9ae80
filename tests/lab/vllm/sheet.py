"""Rows as they come: a JSON file that is whole after each of them; at the end Markdown, and a table in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import typer
from attrs import define, evolve, field, frozen
from sparseprefill.adapters.cli import render
from sparseprefill.adapters.cli.group import Stop, wrote
from sparseprefill.adapters.cli.render import Table

from lab.bench.facts import about
from lab.files import Files, grid

ON_CPU = " These are times of a CPU, which try the command out and say nothing about a GPU."


@frozen(kw_only=True)
class Form:
    """How rows of a kind are shown. cells: of one row, as many as `heads`. fact: of one row, plain data.

    remarks: of one row, what else is to be said of it. notes: of all rows, what the columns mean.
    """

    title: str
    heads: tuple[str, ...]
    cells: Callable[[Any], tuple[str, ...]]
    fact: Callable[[Any], dict[str, Any]]
    remarks: Callable[[Any], Sequence[str]]
    notes: Callable[[Sequence[Any]], str]

    def said(self, rows: Sequence[Any]) -> list[str]:
        """The remarks of all rows, each text once."""
        return list(dict.fromkeys(text for row in rows for text in self.remarks(row)))

    def table(self, rows: Sequence[Any]) -> Table:
        """Heads and cells."""
        return Table(heads=self.heads, rows=[*map(self.cells, rows)])

    def markdown(self, rows: Sequence[Any]) -> str:
        """A table for the documentation."""
        lines = [f"### {self.title}", "", *grid(self.table(rows))]
        remarks = [f"- {text}" for text in self.said(rows)]
        return "\n".join([*lines, "", *remarks, *([""] if remarks else []), self.notes(rows), ""])


@define
class Sheet:
    """settings: what was asked for, as plain data. device: where it ran."""

    form: Form
    files: Files
    settings: Mapping[str, Any]
    device: torch.device
    rows: list[Any] = field(factory=list, init=False)

    def add(self, row: Any) -> None:
        """One more row: written at once, so that a run that is ended keeps what it has."""
        self.rows.append(row)
        if self.files.json is not None and not self.files.alone:
            write(self.files.json, render.to_json(self.facts()) + "\n")
        if not sys.stderr.isatty():
            cells = zip(self.form.heads, self.form.cells(row), strict=True)
            render.note(", ".join(f"{head} {cell}" for head, cell in cells if cell))

    def facts(self) -> dict[str, Any]:
        """Everything that was measured."""
        rows = [self.form.fact(row) for row in self.rows]
        return about(self.device, vllm=version(), **self.settings, rows=rows)

    def end(self, stop: Stop, of: int, failed: Callable[[Any], Any] = attrgetter("error")) -> None:
        """Show all rows and end the command: with 130 after Ctrl-C, with 1 if a row failed. of: rows of a whole run."""
        stop.check(len(self.rows))
        self.finish()
        stop.end(len(self.rows), of, "rows")
        if any(map(failed, self.rows)):
            raise typer.Exit(1)

    def finish(self) -> None:
        """Show all rows."""
        if self.files.markdown is not None:
            write(self.files.markdown, self.form.markdown(self.rows))
        if self.files.alone:
            render.write_json(self.facts())
            return
        form, rows = self.form, self.rows
        render.show(evolve(form.table(rows), title=form.title, remarks=form.said(rows), notes=form.notes(rows)))


def remarks(where: str, row: Any) -> list[str]:
    """Of one row: its error; else why calls ran dense, the commonest reason first, and which ran on a slower kernel.

    row: with the fields `backend`, `error`, `fallbacks` and `slower` of `Loaded`.
    """
    if row.error:
        return [f"{row.backend} failed: {row.error}"]
    common = sorted(row.fallbacks.items(), key=lambda one: -one[1])
    said = [f"{where}: {count} calls ran dense: {reason}" for reason, count in common]
    return said + [f"{where}: {count} calls on a slower kernel: {kernel}" for kernel, count in row.slower.items()]


def or_empty(value: Any, pattern: str) -> str:
    """The value in the pattern, nothing for None."""
    return "" if value is None else pattern.format(value)


def write(path: Path, text: str) -> None:
    """Replace a file as a whole: whoever reads it finds the old text or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
    wrote(path)


def version() -> str | None:
    """Of the vLLM in use, None where none was imported."""
    module = sys.modules.get("vllm")
    return None if module is None else str(getattr(module, "__version__", ""))
