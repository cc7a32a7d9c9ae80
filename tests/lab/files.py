"""Where the figures of an experiment go besides the terminal, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
from attrs import frozen
from sparseprefill.adapters.cli.group import Group, check_writable
from sparseprefill.adapters.cli.render import Table

MarkdownFile = Annotated[Path | None, typer.Option(help="Write the tables to this file as Markdown.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="PATH", help="Write the figures to this file as JSON; - prints only them."),
]
NONE: Mapping[str, str] = MappingProxyType({})


def command(words: str) -> typer.Typer:
    """A command line of one command, which its callback is; words: what it is for."""
    return typer.Typer(
        cls=Group,
        help=words,
        subcommand_metavar="",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


@frozen(kw_only=True)
class Files:
    """Where results go besides the terminal. Raises CommandError, before any work is done, for what cannot be written.

    json: "-" for standard output, and nothing else there.
    """

    plot: Path | None = None
    markdown: Path | None = None
    json: Path | None = None

    def __attrs_post_init__(self) -> None:
        check_writable("--plot", self.plot, ".png", ".svg", ".pdf")
        check_writable("--markdown", self.markdown)
        if not self.alone:
            check_writable("--json", self.json)

    @property
    def alone(self) -> bool:
        """Whether JSON is all that is printed."""
        return self.json is not None and str(self.json) == "-"


def markdown(table: Table, heads: Mapping[str, str] = NONE) -> str:
    """Title, remarks and rows. heads: other words for some."""
    return "\n".join([f"### {table.title}", "", *[f"{text}." for text in table.remarks], "", *grid(table, heads), ""])


def grid(table: Table, heads: Mapping[str, str] = NONE) -> list[str]:
    """Lines of Markdown for the rows alone; all columns but the first are aligned to the right."""
    rows = [[heads.get(head, head) for head in table.heads], *table.rows]
    first, *others = [f"| {' | '.join(row)} |" for row in rows]
    return [first, f"| --- |{' ---: |' * (len(table.heads) - 1)}", *others]
