"""Parts that are installed: the commands `methods`, `show` and `plugins`, and what a part is in plain data.

That is its stages, its parameters with defaults and bounds, its grain.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import NOTHING, Factory, asdict, fields_dict, frozen

from sparseprefill.errors import ParameterError, nearest, told

from . import render
from .options import Json
from .render import Table

if TYPE_CHECKING:
    from sparseprefill.method import Method
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.registry import PluginRecord, Registry

DEFAULTS = "defaults"
"""Name of a setting without parameters."""


def methods(json: Json = False) -> None:
    """List every installed method with its summary and paper."""
    from sparseprefill.registry import default_registry

    registry = default_registry()
    rows = [{"name": one.name, "summary": one.summary, "paper": one.paper} for one in registry.methods().values()]
    if json:
        render.write_json(rows)
    else:
        _show(("name", "summary", "paper"), [tuple(row.values()) for row in rows])
    render.broken(registry)


def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a method, refiner or corrector, such as rowmax.")
    ],
    kind: Annotated[
        str | None, typer.Option(help="method, refiner or corrector, where several have the name.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show a method, refiner or corrector: parameters with defaults and bounds; a method's stages, grain, paper."""
    from sparseprefill.method import FLOOR
    from sparseprefill.registry import KINDS, default_registry

    registry = default_registry()
    if kind is not None and kind not in KINDS:
        raise ParameterError(f"--kind {kind}: it is none{nearest(kind, KINDS)}")
    kinds = registry.kinds(name) if kind is None else (kind,)
    facts = _method(registry.get(name)) if kinds[0] == "method" else _stage(registry, kinds[0], name)
    if json:
        render.write_json(facts)
        return
    render.line(f"{name}: {facts['summary']}", "bold")
    if kinds[0] == "method":
        render.line(f"paper: {facts['paper'] or 'none'}")
        render.line(f"grain: {_grain(facts['grain'])}")
        rows = [tuple(stage.values()) for stage in facts["stages"]]
        _show(("stage", "class", "what it does"), rows, drop=("class",))
    else:
        render.line(f"{kinds[0]}: {facts['class']}, from {facts['from']}")
    known = [(*one.values(),) for one in facts["parameters"]]
    lines = [(name, kind, "required" if needed else str(usual), *rest) for name, kind, usual, *rest, needed in known]
    _show(("parameter", "type", "default", "bounds", "meaning"), lines, drop=("type", "bounds"))
    if kinds[0] == "method":
        render.line(f"Every method also takes {FLOOR}, such as {FLOOR}=0.95: the recall that each head has to reach.")
    for other in kinds[1:]:
        render.line(f"There is a {other} of this name too: sparseprefill show {name} --kind {other}")


def _method(method: Method) -> dict[str, Any]:
    """A method, with the grain and the stages that its defaults build; none where a parameter has no default."""
    known = parameters(method.config)
    pipeline = None if any(one.required for one in known) else method.pipeline()
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper,
        "grain": None if pipeline is None else pipeline.grain,
        "stages": [] if pipeline is None else _stages(pipeline),
        "parameters": [asdict(one) for one in known],
    }


def _stage(registry: Registry, kind: str, name: str) -> dict[str, Any]:
    """A refiner or corrector."""
    found = registry.find(kind, name)
    return {
        "name": name,
        "kind": kind,
        "summary": _summary(found),
        "class": found.__name__,
        "from": registry.owner(kind, name).source,
        "parameters": [asdict(parameter) for parameter in parameters(found)],
    }


def plugins(json: Json = False) -> None:
    """List every plugin found: its distribution, version, what it offers, and the error if it failed to load."""
    from sparseprefill.registry import default_registry

    found = default_registry().plugins()
    if json:
        facts = [asdict(one) for one in found]
        render.write_json([{**fact, "error": _error(one) or None} for fact, one in zip(facts, found, strict=True)])
        return
    offers = ("methods", "refiners", "correctors", "kernels")
    rows = [
        (one.name, one.distribution, one.version, *(", ".join(getattr(one, kind)) for kind in offers), _error(one))
        for one in found
    ]
    _show(("plugin", "distribution", "version", *offers, "error"), rows, drop=("version", "distribution"))


def _show(heads: Sequence[str], rows: Sequence[Sequence[str]], drop: Sequence[str] = ()) -> None:
    """A table of words."""
    render.show(Table(heads=heads, rows=rows, words=heads[1:], drop=drop))


def _error(record: PluginRecord) -> str:
    return "" if record.error is None else f"{type(record.error).__name__}: {told(record.error)}"


def _grain(grain: int | None) -> str:
    if grain is None:
        return "none: the result may depend on how a prompt is cut into chunks"
    if grain == 1:
        return "1 token: you can cut a prompt into chunks anywhere"
    return f"{grain} tokens: you can cut a prompt into chunks at its multiples"


@frozen
class Parameter:
    """One parameter of a method, refiner or corrector, in words. `required`: it has no default."""

    name: str
    type: str
    default: Any
    bounds: str
    doc: str
    required: bool = False


def worded(given: Mapping[str, Any], nothing: str = DEFAULTS) -> str:
    """Parameters that were given, as ``name=value, ...``, without tables; `nothing` where there are none."""
    parts = [f"{name}={value}" for name, value in given.items() if not isinstance(value, Mapping)]
    return ", ".join(parts) or nothing


def parameters(kind: type) -> list[Parameter]:
    """The fields of a method's config, or of a refiner or corrector, described in its docstring as ``name: text.``"""
    fields = {str(one.alias): one for one in fields_dict(kind).values() if one.init}
    docs = _documented(inspect.getdoc(kind) or "", list(fields))
    return [
        Parameter(
            name,
            one.type.__name__ if isinstance(one.type, type) else str(one.type or "any"),
            _default(one.default),
            _bounds(one.validator),
            docs.get(name, ""),
            required=one.default is NOTHING,
        )
        for name, one in fields.items()
    ]


def _stages(pipeline: Pipeline) -> list[dict[str, str]]:
    """Role, name and doc of the stages, as they run."""
    listed = [("estimator", pipeline.estimator), *(("refiner", refiner) for refiner in pipeline.refiners)]
    listed.append(("executor", pipeline.executor))
    if pipeline.corrector is not None:
        listed.append(("corrector", pipeline.corrector))
    listed += [("observer", observer) for observer in pipeline.observers]
    return [{"role": role, "name": type(one).__name__, "doc": _summary(type(one))} for role, one in listed]


def _summary(kind: type) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(kind) or "").strip().split("\n")[0]


def _documented(text: str, names: list[str]) -> dict[str, str]:
    """A docstring's words on each name: from ``name: `` to the next one, or to the end of the paragraph."""
    if not names:
        return {}
    one = "|".join(map(re.escape, names))
    found = {}
    for paragraph in text.split("\n\n"):
        parts = re.split(rf"(?<!\S)((?:{one})(?:, (?:{one}))*): ", " ".join(paragraph.split()))
        for named, doc in zip(parts[1::2], parts[2::2], strict=True):
            found.update(dict.fromkeys(named.split(", "), doc.strip()))
    return found


def _default(default: Any) -> Any:
    if isinstance(default, Factory):  # type: ignore[arg-type]
        return "computed" if default.takes_self else default.factory()
    return None if default is NOTHING else default


def _bounds(validator: object) -> str:
    if validator is None:
        return ""
    doc = validator.__doc__ if isinstance(validator, FunctionType) else repr(validator)
    return (doc or "").strip()
