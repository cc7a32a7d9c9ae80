"""The command `vllm-report`: what prefill did in a vLLM server that runs, asked over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .server_reports import ask, checked, show
from .shared_options import Json

METHOD, PATH, NEEDED = "sparseprefill_report", "/collective_rpc", "VLLM_SERVER_DEV_MODE=1"
EXAMPLE = "http://127.0.0.1:8000"
EXTENSION = "sparseprefill.adapters.vllm.worker.ReportExtension"
REMEDY = '--attention-backend CUSTOM and --additional-config \'{"sparseprefill": {"method": ...}}\''


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("vllm-report")(vllm_report)


def vllm_report(
    url: Annotated[str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for its answer.")] = 30.0,
    json: Json = False,
) -> None:
    """Print the report of a running vLLM server: what each layer did, its density, and why calls ran dense."""
    show(reports(url, timeout), json)


def reports(url: str, timeout: float) -> list[Mapping[str, Any]]:
    """One report for each of the server's workers. CommandError says what is wrong with it, and what would do."""
    body = {"method": METHOD, "timeout": timeout}
    found = ask(url, PATH, body, timeout, example=EXAMPLE, refused=_refused)
    return checked(url, found.get("results"), "vLLM", REMEDY)


def _refused(status: int) -> str:
    if status in (404, 405):
        return f"has no {PATH}: start the server with {NEEDED} in its environment"
    if status in (401, 403):
        return f"refuses to answer ({status}): ask from a place where no key is needed"
    return f"answers with {status}: start the server with --worker-extension-cls {EXTENSION}; its log says more"
