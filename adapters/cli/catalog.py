"""What is installed: the commands `methods`, `show` and `plugins`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import asdict

from sparseprefill.errors import told

from . import describe, render

if TYPE_CHECKING:
    from sparseprefill.registry import PluginRecord

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (methods, show, plugins):
        app.command()(command)


def methods(json: Json = False) -> None:
    """List every installed method with its summary and paper."""
    from sparseprefill.registry import default_registry

    registry = default_registry()
    rows = [{"name": one.name, "summary": one.summary, "paper": one.paper} for one in registry.methods().values()]
    if json:
        render.write_json(rows)
    else:
        render.table(("name", "summary", "paper"), [tuple(row.values()) for row in rows])
    render.broken(registry)


def show(name: Annotated[str, typer.Argument(help="A method's name.")], json: Json = False) -> None:
    """Show a method: stages, parameters with defaults and bounds, grain, paper."""
    from sparseprefill.method import FLOOR
    from sparseprefill.registry import default_registry

    method = default_registry().get(name)
    stages, grain = describe.stages(method)
    parameters = describe.parameters(method)
    if json:
        facts: dict[str, Any] = {"name": method.name, "summary": method.summary, "paper": method.paper, "grain": grain}
        facts["stages"] = [asdict(stage) for stage in stages]
        facts["parameters"] = [asdict(parameter) for parameter in parameters]
        render.write_json(facts)
        return
    render.line(f"{method.name}: {method.summary}", "bold")
    render.line(f"paper: {method.paper or 'none'}")
    render.line(f"grain: {_grain(grain)}")
    render.table(("stage", "class", "what it does"), [(one.role, one.name, one.doc) for one in stages], drop=("class",))
    render.table(
        ("parameter", "type", "default", "bounds", "meaning"),
        [
            (one.name, one.type, "required" if one.required else str(one.default), one.bounds, one.doc)
            for one in parameters
        ],
        drop=("type", "bounds"),
    )
    render.line(f"Every method also takes {FLOOR}, such as {FLOOR}=0.95: the recall that each head has to reach.")


def plugins(json: Json = False) -> None:
    """List every plugin found: its distribution, version and methods, and the error if it failed to load."""
    from sparseprefill.registry import default_registry

    found = default_registry().plugins()
    if json:
        facts = [asdict(one) for one in found]
        render.write_json([{**fact, "error": _error(one) or None} for fact, one in zip(facts, found, strict=True)])
        return
    render.table(
        ("plugin", "distribution", "version", "methods", "error"),
        [(one.name, one.distribution, one.version, ", ".join(one.methods), _error(one)) for one in found],
        drop=("version", "distribution"),
    )


def _error(record: PluginRecord) -> str:
    return "" if record.error is None else f"{type(record.error).__name__}: {told(record.error)}"


def _grain(grain: int | None) -> str:
    if grain is None:
        return "none: the result may depend on how a prompt is cut into chunks"
    if grain == 1:
        return "1 token: you can cut a prompt into chunks anywhere"
    return f"{grain} tokens: you can cut a prompt into chunks at its multiples"
