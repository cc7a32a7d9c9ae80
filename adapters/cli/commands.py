"""The application and its commands. A new command is a module with a ``register(app)``, named in MODULES.

Commands that make a table for a method come from the plugins: see `tables`.

None of these modules may import torch or a host's library when it is imported: `--help` and completion wait for them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sparseprefill import __version__

from . import (
    bench,
    calibrate,
    catalog,
    compare,
    demo,
    evaluate,
    fit,
    new,
    servers,
)
from .tables import WithTables, short

MODULES = (demo, compare, fit, evaluate, bench, catalog, new, calibrate, servers)
"""Modules of commands, in the order of the help text."""

app = typer.Typer(
    name="sparseprefill",
    cls=WithTables,
    help="Training-free sparse prefill attention: see what is installed, and what it does to a model.",
    pretty_exceptions_enable=False,
    # Plain text: it wraps at any width, where boxes leave words a third of a narrow terminal, and takes half the time.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for module in MODULES:
    module.register(app)
for command in app.registered_commands:
    command.short_help = short((command.callback and command.callback.__doc__) or "")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
