"""What a method is, as plain data: stages, parameters with defaults and bounds, grain, paper."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from attrs import NOTHING, Attribute, Factory, fields_dict, frozen

if TYPE_CHECKING:
    from sparseprefill.method import Method

DEFAULTS = "defaults"
"""What a method is said to run at where no parameter was given."""


@frozen
class Parameter:
    """One parameter of a method, in words. `required`: it has no default."""

    name: str
    type: str
    default: Any
    bounds: str
    doc: str
    required: bool = False


@frozen
class Stage:
    """One stage of the pipeline that the defaults build."""

    role: str
    name: str
    doc: str


def told(given: Mapping[str, Any], nothing: str = DEFAULTS) -> str:
    """Parameters that were given, as ``name=value, ...``, without tables; `nothing` where there are none."""
    parts = [f"{name}={value}" for name, value in given.items() if not isinstance(value, Mapping)]
    return ", ".join(parts) or nothing


def parameters(method: Method) -> list[Parameter]:
    """The fields of the method's config. Its docstring describes them as ``name: text. other: text.``"""
    fields = {name: one for name, one in fields_dict(method.config).items() if one.init}
    docs = _documented(method.config.__doc__ or "", list(fields))
    return [
        Parameter(name, _type(one), _default(one), _bounds(one.validator), docs.get(name, ""), one.default is NOTHING)
        for name, one in fields.items()
    ]


def stages(method: Method) -> tuple[list[Stage], int | None]:
    """The stages in the order in which they run, and the pipeline's grain. Parameters without default: none."""
    if any(one.required for one in parameters(method)):
        return [], None
    pipeline = method.pipeline()
    listed = [("estimator", pipeline.estimator), *(("refiner", refiner) for refiner in pipeline.refiners)]
    listed.append(("executor", pipeline.executor))
    if pipeline.corrector is not None:
        listed.append(("corrector", pipeline.corrector))
    listed += [("observer", observer) for observer in pipeline.observers]
    return [Stage(role, type(stage).__name__, _first_line(stage)) for role, stage in listed], pipeline.grain


def plain(value: Any) -> Any:
    """A value that JSON can hold: what it cannot becomes text, infinity ``"inf"``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _documented(text: str, names: list[str]) -> dict[str, str]:
    if not names:
        return {}
    parts = re.split(rf"(?<!\S)({'|'.join(map(re.escape, names))}): ", " ".join(text.split()))
    return {name: doc.strip() for name, doc in zip(parts[1::2], parts[2::2], strict=True)}


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


def _first_line(stage: object) -> str:
    doc = inspect.getdoc(type(stage)) or ""
    return doc.strip().split("\n")[0]
