"""What a method, refiner or corrector is, as plain data: stages, parameters with defaults and bounds, grain."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from attrs import NOTHING, Attribute, Factory, fields_dict, frozen

if TYPE_CHECKING:
    from sparseprefill.method import Method

DEFAULTS = "defaults"
"""What a method is said to run at where no parameter was given."""


@frozen
class Parameter:
    """One parameter of a method, refiner or corrector, in words. `required`: it has no default."""

    name: str
    type: str
    default: Any
    bounds: str
    doc: str
    required: bool = False


def told(given: Mapping[str, Any], nothing: str = DEFAULTS) -> str:
    """Parameters that were given, as ``name=value, ...``, without tables; `nothing` where there are none."""
    parts = [f"{name}={value}" for name, value in given.items() if not isinstance(value, Mapping)]
    return ", ".join(parts) or nothing


def parameters(kind: type) -> list[Parameter]:
    """The fields of a method's config, or of a refiner or corrector, described in its docstring as ``name: text.``"""
    fields = {str(one.alias): one for one in fields_dict(kind).values() if one.init}
    docs = _documented(inspect.getdoc(kind) or "", list(fields))
    return [
        Parameter(name, _type(one), _default(one), _bounds(one.validator), docs.get(name, ""), one.default is NOTHING)
        for name, one in fields.items()
    ]


def stages(method: Method) -> tuple[list[dict[str, str]], int | None]:
    """Role, name and doc of the stages that the defaults build, as they run, and the pipeline's grain.

    No stages for a method with parameters that have no default.
    """
    if any(one.required for one in parameters(method.config)):
        return [], None
    pipeline = method.pipeline()
    listed = [("estimator", pipeline.estimator), *(("refiner", refiner) for refiner in pipeline.refiners)]
    listed.append(("executor", pipeline.executor))
    if pipeline.corrector is not None:
        listed.append(("corrector", pipeline.corrector))
    listed += [("observer", observer) for observer in pipeline.observers]
    found = [{"role": role, "name": type(one).__name__, "doc": summary(type(one))} for role, one in listed]
    return found, pipeline.grain


def summary(kind: type) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(kind) or "").strip().split("\n")[0]


def _documented(text: str, names: list[str]) -> dict[str, str]:
    """What a docstring says of each name: from ``name: `` to the next one, or to the end of the paragraph."""
    if not names:
        return {}
    one = "|".join(map(re.escape, names))
    found = {}
    for paragraph in text.split("\n\n"):
        parts = re.split(rf"(?<!\S)((?:{one})(?:, (?:{one}))*): ", " ".join(paragraph.split()))
        for named, doc in zip(parts[1::2], parts[2::2], strict=True):
            found.update(dict.fromkeys(named.split(", "), doc.strip()))
    return found


def _type(attribute: Attribute[Any]) -> str:
    return attribute.type.__name__ if isinstance(attribute.type, type) else str(attribute.type or "any")


def _default(attribute: Attribute[Any]) -> Any:
    default = attribute.default
    if default is NOTHING:
        return None
    if isinstance(default, Factory):  # type: ignore[arg-type]
        factory: Any = default
        return "computed" if factory.takes_self else factory.factory()
    return default


def _bounds(validator: object) -> str:
    if validator is None:
        return ""
    doc = validator.__doc__ if isinstance(validator, FunctionType) else repr(validator)
    return (doc or "").strip()
