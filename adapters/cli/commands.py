"""The application and its commands. A new command is a module with a ``register(app)``, named in MODULES."""

from __future__ import annotations

from typing import Annotated

import typer

from sparseprefill import __version__

from . import bench, calibrate, catalog, cluster, compare, demo, evaluate, fit, frontier, tune
from .group import Group

MODULES = (demo, compare, fit, frontier, evaluate, bench, catalog, tune, cluster, calibrate)
"""Modules of commands, in the order of the help text."""

app = typer.Typer(
    cls=Group,
    help="Training-free sparse prefill attention: see what is installed, and what it does to a model.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in MODULES:
    module.register(app)


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
