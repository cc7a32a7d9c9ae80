"""The application and its commands."""

from __future__ import annotations

import typer
from sparseprefill.adapters.cli.group import Group

from . import answers, decode, equal, load, pages, pretrained, requests, ttft

app = typer.Typer(
    cls=Group,
    help="Measure and check the attention backend in vLLM's own engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (equal, ttft, load, decode, answers, pretrained, pages, requests):
    module.register(app)
