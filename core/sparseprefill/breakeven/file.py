"""A break-even table as plain data: what its JSON file holds, read with errors that name the field."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sparseprefill.breakeven.points import DeviceKind, HeadShape, MethodTime, Point
from sparseprefill.errors import ParameterError, printed

_POINT = ("queries", "keys", "dense", "executor", "methods")
_SHAPE = ("heads", "kv_heads", "head_dim", "dtype", "points")
MOST = 1 << 40
"""No size reaches it; products of sizes up to it are floats still."""
DTYPES = ("float16", "bfloat16", "float32", "float64")


def device_facts(device: DeviceKind) -> dict[str, Any]:
    """As `device_of` reads it."""
    capability = None if device.capability is None else list(device.capability)
    return {"type": device.type, "capability": capability, "name": device.name}


def device_of(facts: object) -> DeviceKind:
    """The device; ParameterError names the field that does not fit."""
    facts = table("device", facts, ("type", "capability", "name"))
    for name in ("type", "name"):
        if not isinstance(facts[name], str):
            raise ParameterError(f"device.{name} is {printed(facts[name])}: pass a string")
    capability = facts["capability"]
    if capability is None:
        return DeviceKind(type=facts["type"], name=facts["name"])
    if not isinstance(capability, list) or len(capability) != 2 or not all(_whole(one, 0) for one in capability):
        raise ParameterError(f"device.capability is {printed(capability)}: pass two integers, such as [9, 0], or null")
    return DeviceKind(type=facts["type"], capability=(capability[0], capability[1]), name=facts["name"])


def shape_facts(shape: HeadShape) -> dict[str, Any]:
    """As `shape_of` reads it."""
    facts: dict[str, Any] = {name: getattr(shape, name) for name in _SHAPE[:-1]}
    return {**facts, "points": [_point_facts(point) for point in shape.points]}


def shape_of(at: str, facts: object) -> HeadShape:
    """One shape and its points; ParameterError names the field, its path in front."""
    facts = table(at, facts, _SHAPE)
    for name in _SHAPE[:3]:
        if not _whole(facts[name], 1):
            raise ParameterError(f"{at}.{name} is {printed(facts[name])}: pass a positive integer up to 2^40")
    if facts["heads"] % facts["kv_heads"]:
        raise ParameterError(f"{at}.heads is {facts['heads']}: pass a multiple of the {facts['kv_heads']} kv_heads")
    if facts["dtype"] not in DTYPES:
        raise ParameterError(f"{at}.dtype is {printed(facts['dtype'])}: pass one of {', '.join(DTYPES)}")
    points = tuple(_point(f"{at}.points[{i}]", one) for i, one in enumerate(listed(f"{at}.points", facts["points"])))
    try:
        return HeadShape(**{**facts, "points": points})
    except ParameterError as error:
        raise ParameterError(f"{at}.{error}") from error


def table(at: str, value: object, names: Sequence[str] | None = None) -> Mapping[str, Any]:
    """An object, with just these names if they are given."""
    if not isinstance(value, Mapping):
        raise ParameterError(f"{at} is {printed(value)}: pass an object")
    for name in value if names is not None else ():
        if names is not None and name not in names:
            raise ParameterError(f"{at}.{name} is not a field of a break-even table; its fields are {', '.join(names)}")
    for name in names or ():
        if name not in value:
            raise ParameterError(f"{at}.{name} is missing")
    return value


def listed(at: str, value: object) -> list[Any]:
    """A list that is not empty."""
    if not isinstance(value, list) or not value:
        raise ParameterError(f"{at} is {printed(value)}: pass a list with at least one entry")
    return value


def _point_facts(point: Point) -> dict[str, Any]:
    return {
        "queries": point.queries,
        "keys": point.keys,
        "dense": point.dense,
        "executor": [{"density": density, "seconds": seconds} for density, seconds in point.executor],
        "methods": {
            name: {"seconds": one.seconds, "estimate": one.estimate, "density": one.density}
            for name, one in sorted(point.methods.items())
        },
    }


def _point(at: str, facts: object) -> Point:
    facts = table(at, facts, _POINT)
    for name in ("queries", "keys"):
        if not _whole(facts[name], 1):
            raise ParameterError(f"{at}.{name} is {printed(facts[name])}: pass a positive integer up to 2^40")
    if facts["queries"] > facts["keys"]:
        remedy = "there cannot be more queries than keys; pass at most the keys"
        raise ParameterError(f"{at}.queries is {facts['queries']}: {remedy}")
    methods = table(f"{at}.methods", facts["methods"])
    return Point(
        queries=facts["queries"],
        keys=facts["keys"],
        dense=_seconds(f"{at}.dense", facts["dense"]),
        executor=_executor(f"{at}.executor", facts["executor"]),
        methods={name: _method(f"{at}.methods.{name}", one) for name, one in methods.items()},
    )


def _executor(at: str, value: object) -> tuple[tuple[float, float], ...]:
    if not isinstance(value, list):
        raise ParameterError(f"{at} is {printed(value)}: pass a list")
    made: list[tuple[float, float]] = []
    for i, one in enumerate(value):
        facts = table(f"{at}[{i}]", one, ("density", "seconds"))
        density = _density(f"{at}[{i}].density", facts["density"])
        if made and density <= made[-1][0]:
            raise ParameterError(
                f"{at}[{i}].density is {density}: densities must ascend, and {made[-1][0]} comes before"
            )
        made.append((density, _seconds(f"{at}[{i}].seconds", facts["seconds"])))
    return tuple(made)


def _method(at: str, value: object) -> MethodTime:
    facts = table(at, value, ("seconds", "estimate", "density"))
    return MethodTime(
        seconds=_seconds(f"{at}.seconds", facts["seconds"]),
        estimate=_seconds(f"{at}.estimate", facts["estimate"]),
        density=_density(f"{at}.density", facts["density"]),
    )


def _seconds(at: str, value: object) -> float:
    if not _number(value) or not 1e-12 <= value <= 1e12:  # type: ignore[operator]
        raise ParameterError(f"{at} is {printed(value)}: pass seconds, a finite number above 0 (1e-12 to 1e12)")
    return float(value)  # type: ignore[arg-type]


def _density(at: str, value: object) -> float:
    if not _number(value) or not 0 < value <= 1:  # type: ignore[operator]
        raise ParameterError(f"{at} is {printed(value)}: pass a share of the causal pairs, above 0 and up to 1")
    return float(value)  # type: ignore[arg-type]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST
