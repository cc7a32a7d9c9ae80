"""The command `vllm-report`: what prefill did in a vLLM server that runs, asked over HTTP."""

from __future__ import annotations

import json as reading
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from . import render
from .group import CommandError
from .shared_options import Json

METHOD, PATH, NEEDED = "sparseprefill_report", "/collective_rpc", "VLLM_SERVER_DEV_MODE=1"
EXAMPLE = "http://127.0.0.1:8000"
EXTENSION = "sparseprefill.adapters.vllm.worker.ReportExtension"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("vllm-report")(vllm_report)


def vllm_report(
    url: Annotated[str, typer.Argument(help="Address of the server, such as http://127.0.0.1:8000.")],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for its answer.")] = 30.0,
    json: Json = False,
) -> None:
    """Print the report of a running vLLM server: what each layer did, its density, and why calls ran dense."""
    workers = reports(url, timeout)
    if json:
        render.write_json(workers)
        return
    for number, report in enumerate(workers):
        if len(workers) > 1:
            render.line(f"worker {report.get('worker', number)}", "bold")
        typer.echo(report["text"])
        for name, other in report.get("profiles", {}).items():
            render.line(f"profile {name}", "bold")
            typer.echo(other["text"])


def reports(url: str, timeout: float) -> list[Mapping[str, Any]]:
    """One report for each of the server's workers. CommandError says what is wrong with it, and what would do."""
    import urllib.error
    import urllib.parse
    import urllib.request
    from http.client import HTTPException

    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise CommandError(f"{url!r} is not the address of a server: pass one such as {EXAMPLE}")
    body = reading.dumps({"method": METHOD, "timeout": timeout}).encode()
    request = urllib.request.Request(url.rstrip("/") + PATH, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            said = answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise CommandError(f"{url} {_refused(error.code)}") from error
    except (OSError, HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error)
        raise CommandError(
            f"no server answers at {url} ({reason}): check that it runs, and the address, such as {EXAMPLE}"
        ) from error
    try:
        found = reading.loads(said)
    except ValueError:
        found = None
    results = found.get("results") if isinstance(found, Mapping) else None
    if not isinstance(results, list):
        raise CommandError(f"{url} answers, but not as vLLM does: check the address")
    if not all(isinstance(one, Mapping) and "text" in one for one in results) or not results:
        raise CommandError(
            f"{url} does not run prefill through sparseprefill: start it with --attention-backend CUSTOM and "
            '--additional-config \'{"sparseprefill": {"method": ...}}\''
        )
    return results


def _refused(status: int) -> str:
    if status in (404, 405):
        return f"has no {PATH}: start the server with {NEEDED} in its environment"
    if status in (401, 403):
        return f"refuses to answer ({status}): ask from a place where no key is needed"
    return f"answers with {status}: start the server with --worker-extension-cls {EXTENSION}; its log says more"
