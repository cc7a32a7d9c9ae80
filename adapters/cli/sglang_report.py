"""The command `sglang-report`: what prefill did in an SGLang server that runs, asked over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .server_reports import ask, checked, show
from .shared_options import Json

PATH, EXAMPLE = "/server_info", "http://127.0.0.1:30000"
REMEDY = "--prefill-attention-backend sparseprefill and SPARSEPREFILL_SGLANG='{\"method\": ...}'"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sglang-report")(sglang_report)


def sglang_report(
    url: Annotated[str, typer.Argument(help="Address of the server, such as http://127.0.0.1:30000.")],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for its answer.")] = 30.0,
    json: Json = False,
) -> None:
    """Print the report of a running SGLang server: what each layer did, its density, and why calls ran dense."""
    show(reports(url, timeout), json)


def reports(url: str, timeout: float) -> list[Mapping[str, Any]]:
    """One report for each of the server's data-parallel ranks. CommandError says what is wrong, and what would do."""
    states = ask(url, PATH, None, timeout, example=EXAMPLE, refused=_refused).get("internal_states")
    if not isinstance(states, list) or not all(isinstance(one, Mapping) for one in states):
        states = None
    found = None if states is None else [one for state in states for one in state.get("sparseprefill", [])]
    return checked(url, found, "SGLang", REMEDY)


def _refused(status: int) -> str:
    if status in (401, 403):
        return f"refuses to answer ({status}): ask from a place where no key is needed"
    return f"answers {PATH} with {status}: its log says more"
