"""What the commands share that ask a running server what its prefill did, over HTTP."""

from __future__ import annotations

import json as reading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from . import render
from .group import CommandError


def show(reports: Sequence[Mapping[str, Any]], json: bool) -> None:
    """Print the reports of a server's workers, or write them as JSON."""
    if json:
        render.write_json(list(reports))
        return
    for number, report in enumerate(reports):
        if len(reports) > 1:
            render.line(f"worker {report.get('worker', number)}", "bold")
        typer.echo(report["text"])
        for name, other in report.get("profiles", {}).items():
            render.line(f"profile {name}", "bold")
            typer.echo(other["text"])


def ask(
    url: str, path: str, body: object, timeout: float, *, example: str, refused: Callable[[int], str]
) -> Mapping[str, Any]:
    """What a server answers to a body in JSON, or to a plain question where that is None; empty for no JSON object.

    refused: what a status other than 200 means. CommandError says what is wrong, and what would do.
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
            said = answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise CommandError(f"{url} {refused(error.code)}") from error
    except (OSError, HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error)
        raise CommandError(
            f"no server answers at {url} ({reason}): check that it runs, and the address, such as {example}"
        ) from error
    try:
        found = reading.loads(said)
    except ValueError:
        found = None
    return found if isinstance(found, Mapping) else {}


def checked(url: str, found: object, server: str, remedy: str) -> list[Mapping[str, Any]]:
    """The reports in a server's answer; CommandError where they are none. found: a list, empty without the adapter."""
    if not isinstance(found, list):
        raise CommandError(f"{url} answers, but not as {server} does: check the address")
    if not all(isinstance(one, Mapping) and "text" in one for one in found) or not found:
        raise CommandError(f"{url} does not run prefill through sparseprefill: start it with {remedy}")
    return found
