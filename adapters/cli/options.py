"""What the options of `demo` mean: contenders and their parameters, device and dtype."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparseprefill.config import from_config
from sparseprefill.errors import nearest
from sparseprefill.registry import Registry

from ..demo.hybrids import HYBRIDS
from ..demo.outcome import Contender
from ..demo.settings import PARAMETERS
from .group import CommandError

STOCK = "stock"
"""The name of the stock model's row: the model with its own dense attention."""

DENSE = "dense"
"""The registry's method that computes the same, through the sparse executor; left out unless it is named."""


def contenders(registry: Registry, names: Sequence[str], settings: Sequence[str]) -> list[Contender]:
    """The stock model, then the methods to compare, built: those named, or every one that is registered.

    settings: texts ``name.parameter=value``, over the parameters that suit the embedded model. Raises CommandError or
    the library's own errors for anything that does not fit.
    """
    chosen = list(dict.fromkeys(names)) or [name for name in registry.methods() if name != DENSE]
    changes: dict[str, dict[str, Any]] = {registry.get(name).name: {} for name in chosen}
    for text in settings:
        method, parameter, value = setting(text)
        if method not in changes:
            raise CommandError(
                f"--set {text}: {method!r} is not among the methods of this run{nearest(method, changes)}"
            )
        changes[method][parameter] = value
    made = [Contender(STOCK)]
    for name, changed in changes.items():
        parameters = {**PARAMETERS.get(name, {}), **changed}
        made.append(Contender(name, registry.build(name, **parameters), parameters))
    return made


def configured(paths: Sequence[Path], hybrids: bool) -> list[Contender]:
    """Contenders from configuration files, named by their `name` or the file, and the hybrids that ship."""
    tables = HYBRIDS if hybrids else {}
    made = [Contender(name, from_config(dict(table)), table) for name, table in tables.items()]
    for path in paths:
        pipeline = from_config(path)
        made.append(Contender(pipeline.name, pipeline, {"config": str(path)}))
    return made


def setting(text: str) -> tuple[str, str, Any]:
    """Method, parameter and value of a text ``method.parameter=value``; CommandError for another."""
    target, equals, value = text.partition("=")
    method, dot, parameter = target.strip().rpartition(".")
    if not (equals and dot and method and parameter and value.strip()):
        raise CommandError(f"--set {text}: write method.parameter=value, such as --set anchor-attention.theta=4")
    return method, parameter, value_of(value.strip())


def value_of(text: str) -> Any:
    """JSON where it is JSON, True and False, numbers such as inf, else the text itself."""
    for read in (json.loads, {"True": True, "False": False, "None": None}.__getitem__, float):
        try:
            return read(text)
        except (ValueError, KeyError):
            continue
    return text
