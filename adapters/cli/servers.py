"""The commands for servers: what prefill did in one that runs, and whether vLLM would take a configuration."""

from __future__ import annotations

import json as reading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import asdict

from sparseprefill import structure
from sparseprefill.errors import ParameterError

from . import loading, render
from .group import CommandError
from .options import Json, finite

VLLM, SGLANG = "http://127.0.0.1:8000", "http://127.0.0.1:30000"
"""Default address of the servers."""
CONFIG = '\'{"sparseprefill": {"method": "rowmax"}}\''
"""A configuration, as a shell takes it."""
NEEDED = "VLLM_PLUGINS=sparseprefill"
"""The option that opens our own endpoint; vLLM without endpoint plugins has another, in development mode."""
EXTENSION = "sparseprefill.adapters.vllm.worker.ReportExtension"
TABLE = "sparseprefill"
"""The key of our table in vLLM's additional configuration, and of our reports in SGLang's answer."""
Timeout = Annotated[float, typer.Option(min=0.1, callback=finite, help="Seconds to wait for its answer.")]


def vllm_check(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help=f"What vLLM gets as --additional-config: JSON such as {CONFIG}, or a .json or .toml file of it.",
        ),
    ],
    model: Annotated[str, typer.Option(help="Folder of the model, such as ./my-model; its weights are not loaded.")],
    json: Json = False,
) -> None:
    """Check a configuration for vLLM against a model without starting a server: what it would refuse, and run dense."""
    additional, folder = _read(config), Path(model)
    if not model or not (folder / "config.json").is_file():
        there = folder / "config.json"
        raise CommandError(f"--model {model or repr(model)}: there is no {there}; pass a folder of a model")
    try:
        from transformers import AutoConfig

        from ..vllm.check import check
    except ImportError as error:
        raise CommandError(
            f"the model cannot be read ({error}): install vLLM, or transformers: pip install transformers"
        ) from error
    with loading.reading(model, "--model", "config.json"):
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    found = check(additional, whole, model)
    if json:
        render.write_json(asdict(found))
    else:
        render.line(found.model, "bold")
        for one in found.expected:
            whose = f"profile {one.profile}: " if one.profile else ""
            keyed = one.sparse + sum(one.dense.values())
            typer.echo(f"{whose}{one.method} in {one.sparse} of {keyed} layers")
            for why, count in one.dense.items():
                typer.echo(f"  {count} dense: {why}")
        for flag in found.flags:
            typer.echo(f"the server needs {flag}")
    if not any(one.sparse for one in found.expected):
        raise CommandError("nothing would run sparse: choose a method that serves this model, or leave the backend out")


def vllm_report(
    url: Annotated[str, typer.Argument(metavar="URL", help=f"Address of the server, such as {VLLM}.")],
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Print the report of a running vLLM server: what each layer did, its density, and why calls ran dense."""
    from ..vllm.endpoint import ROUTE
    from ..vllm.plugin import VARIABLE, excluded

    def refused(status: int) -> str:
        if status in (404, 405):
            raise _AbsentError
        return f"answers with {status}: start the server with --worker-extension-cls {EXTENSION}; its log says more"

    try:
        found = _ask(url, ROUTE, None, timeout, VLLM, refused)
        if "results" not in found:  # an answer for every path is none
            raise _AbsentError
    except _AbsentError:
        body = {"method": "sparseprefill_report", "timeout": timeout}
        try:
            found = _ask(url, "/collective_rpc", body, timeout, VLLM, refused)
        except _AbsentError as error:
            raise CommandError(
                f"{url} has no {ROUTE}: start the server with {NEEDED} in its environment (and with the other plugins "
                "that it needs, behind a comma); a vLLM without endpoint plugins with VLLM_SERVER_DEV_MODE=1"
            ) from error
    start = '--attention-backend CUSTOM and --additional-config \'{"sparseprefill": {"method": ...}}\''
    _show(url, found.get("results"), "vLLM", f"{start}; {_loading(VARIABLE, excluded())}", json)


class _AbsentError(Exception):
    """A server has no such path."""


def sglang_report(
    url: Annotated[str, typer.Argument(metavar="URL", help=f"Address of the server, such as {SGLANG}.")],
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Print the report of a running SGLang server: what each layer did, its density, and why calls ran dense."""
    path = "/server_info"
    answer = _ask(url, path, None, timeout, SGLANG, lambda status: f"answers {path} with {status}: its log says more")
    states = answer.get("internal_states")
    ours = [one.get(TABLE, []) for one in states if isinstance(one, Mapping)] if isinstance(states, list) else []
    good = isinstance(states, list) and len(ours) == len(states) and all(isinstance(one, list) for one in ours)
    found = [one for each in ours for one in each] if good else None
    from ..sglang.plugin import VARIABLE, excluded

    start = "--prefill-attention-backend sparseprefill and SPARSEPREFILL_SGLANG='{\"method\": ...}'"
    _show(url, found, "SGLang", f"{start}; {_loading(VARIABLE, excluded())}", json)


def _loading(variable: str, why: str | None) -> str:
    """The further step that lets a server load the adapter. why: it would not, in the environment of this command."""
    return f"{variable} of its environment, if set, must name sparseprefill" + (f" (here {why})" if why else "")


def _ask(url: str, path: str, body: object, timeout: float, example: str, refused: Any) -> Mapping[str, Any]:
    """A server's answer to a body in JSON, or to a plain question where that is None; empty for no JSON object.

    refused: says what a status other than 200 means. CommandError says what is wrong, and what would do.
    """
    import urllib.error
    import urllib.parse
    import urllib.request
    from http.client import HTTPException

    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise CommandError(f"{url!r} is not the address of a server: pass one such as {example}")
    data = None if body is None else reading.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            found = reading.loads(answer.read())
    except urllib.error.HTTPError as error:
        error.close()
        locked = f"refuses to answer ({error.code}): ask from a place where no key is needed"
        raise CommandError(f"{url} {locked if error.code in (401, 403) else refused(error.code)}") from error
    except (OSError, HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error)
        raise CommandError(
            f"no server answers at {url} ({reason}): check that it runs, and the address, such as {example}"
        ) from error
    except ValueError:
        found = None
    return found if isinstance(found, Mapping) else {}


def _show(url: str, found: object, server: str, start: str, json: bool) -> None:
    """Print the reports of a server's workers, or write them as JSON; CommandError where they are none.

    found: a list, empty without the adapter. start: what a server with it is started with.
    """
    if not isinstance(found, list):
        raise CommandError(f"{url} answers, but not as {server} does: check the address")
    if not all(_is_report(one) and all(map(_is_report, _profiles(one).values())) for one in found) or not found:
        raise CommandError(f"{url} does not run prefill through sparseprefill: start it with {start}")
    if json:
        render.write_json(found)
        return
    for number, report in enumerate(found):
        if len(found) > 1:
            render.line(f"worker {report.get('worker', number)}", "bold")
        typer.echo(report["text"])
        for name, other in _profiles(report).items():
            render.line(f"profile {name}", "bold")
            typer.echo(other["text"])


def _is_report(found: object) -> bool:
    return isinstance(found, Mapping) and "text" in found


def _profiles(report: Mapping[str, Any]) -> Mapping[str, Any]:
    found = report.get("profiles")
    return found if isinstance(found, Mapping) else {}


def _read(config: str) -> Mapping[str, Any]:
    """The additional configuration, as vLLM gets it."""
    loads, kind = (tomllib.loads, "TOML") if config.lower().endswith(".toml") else (structure.loads, "JSON")
    try:
        text = config if config.lstrip().startswith("{") else structure.read(config)
        return structure.table(structure.parsed(text, loads, kind))
    except ParameterError as error:
        raise CommandError(f"{config or repr(config)}: {error}; give JSON, or a .json or .toml file") from error
