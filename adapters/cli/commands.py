"""The application and its commands. A new command is a function, named in COMMANDS.

Commands that make a table for a method come from the plugins: see `tables`.

None of these modules may import torch or a host's library when it is imported: `--help` and completion wait for them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sparseprefill import __version__

from . import attempt, calibrate, catalog, compare, demo, evaluate, fit, new, replay, servers
from .tables import WithTables, short

COMMANDS = (
    *(attempt.try_, demo.demo, compare.compare, fit.fit, evaluate.evaluate, calibrate.calibrate),
    *(catalog.methods, catalog.show, catalog.plugins, new.new),
    *(replay.replay, servers.vllm_check, servers.vllm_report, servers.sglang_report),
)
"""In the order of the help text; a command is called as its function is, `try` as `try_`."""

app = typer.Typer(
    name="sparseprefill",
    cls=WithTables,
    help="Training-free sparse prefill attention: see what is installed, and what it does to a model.",
    pretty_exceptions_enable=False,
    # Plain text: it wraps at any width, where boxes leave words a third of a narrow terminal, and takes half the time.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for function in COMMANDS:
    app.command(function.__name__.strip("_").replace("_", "-"), short_help=short(function.__doc__ or ""))(function)


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
