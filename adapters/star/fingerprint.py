"""Settings as plain values that are the same wherever equal settings were made: in no process's words."""

from __future__ import annotations

import hashlib
import json
import re
import types
from collections.abc import Iterable, Mapping, Set
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor

DEEPEST = 40
"""Levels of nesting that are looked at."""


def fingerprint(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A value as a tree of JSON: no address, no device's number, no order of a set.

    An attrs class is its name and what it was given; any other object its name and what pickle would keep of it; a
    function its module and qualified name, with defaults and what it closes over; a tensor or array its shape, type
    and hash.
    above: the values that this one is part of, by `id`.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if id(value) in above or len(above) >= DEEPEST:
        return {"class": _name(type(value)), "again": True}
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        pairs = {key if isinstance(key, str) else json.dumps(fingerprint(key, inside)): x for key, x in value.items()}
        return {key: fingerprint(pairs[key], inside) for key in sorted(pairs)}
    if isinstance(value, list | tuple):
        return [fingerprint(x, inside) for x in value]
    if isinstance(value, Set):
        return sorted((fingerprint(x, inside) for x in value), key=json.dumps)
    if isinstance(value, float | complex):
        return repr(value)
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        return _hashed("tensor", whole.shape, whole.dtype, whole.view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, bytes | bytearray):
        return _hashed("bytes", (len(value),), "", bytes(value))
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        array: Any = value
        return _hashed("array", array.shape, array.dtype, array.tobytes())
    if isinstance(value, torch.device):
        return f"device {value.type}"  # its number is a rank's own
    if isinstance(value, type | types.BuiltinFunctionType):
        return _name(value)
    return {name: fingerprint(x, inside) for name, x in _parts(value).items()}


def _parts(value: Any) -> dict[str, Any]:
    """A function's or an object's name and what it holds."""
    if isinstance(value, types.FunctionType):
        name = _name(value)
        if value.__name__ == "<lambda>":
            name = f"{name} of line {value.__code__.co_firstlineno}"
        held = dict(zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True))
        options = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__, "closure": held}
        return {"class": f"function {name}"} | {kind: given for kind, given in options.items() if given}
    if attrs.has(type(value)):
        names = [one.name for one in attrs.fields(type(value)) if one.init]
        return {"class": _name(type(value))} | {name: getattr(value, name) for name in names}
    try:
        made: Any = value.__reduce_ex__(2)
    except Exception:  # what nobody can pickle goes by its words
        made = re.sub(r" at 0x[0-9a-f]+", "", repr(value), flags=re.IGNORECASE)
    if isinstance(made, str):
        return {"class": _name(type(value)), "name": made}
    parts: list[Any] = [*made[1:5], None]
    given, state, items = parts[0], parts[1], parts[2:]  # arguments, attributes, what a list or a mapping holds
    found = {"class": _name(type(value)), "arguments": [x for x in given if x is not type(value)]}
    for attributes in state if isinstance(state, tuple) else (state,):  # of the object, and then those in slots
        found |= attributes if isinstance(attributes, dict) else {"state": attributes}
    return found | {"items": [list(x) for x in items if x is not None]}


def _hashed(kind: str, shape: Iterable[int], dtype: Any, content: bytes) -> str:
    return f"{kind} {list(shape)} {dtype} {hashlib.sha256(content).hexdigest()[:16]}"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
