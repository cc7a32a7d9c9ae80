"""Settings as plain values that are the same wherever equal settings were made: in no process's words."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import types
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor

DEEPEST = 40
"""Levels of nesting that are looked at."""


def fingerprint(value: Any) -> Any:
    """A value as a tree of JSON: no address, no device's number, no order of a set.

    An attrs or data class is its name and what it was given; any other object its name and its attributes; a function
    its module and qualified name, with defaults and what it closes over; a tensor or array its shape, type and hash.
    """
    return _tree(value, ())


def _tree(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if id(value) in above or len(above) >= DEEPEST:
        return {"class": _name(type(value)), "again": True}
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        pairs = {key if isinstance(key, str) else json.dumps(_tree(key, inside)): x for key, x in value.items()}
        return {key: _tree(pairs[key], inside) for key in sorted(pairs)}
    if isinstance(value, list | tuple):
        return [_tree(x, inside) for x in value]
    if isinstance(value, Set):
        return sorted((_tree(x, inside) for x in value), key=json.dumps)
    plain = _leaf(value)
    if plain is not None:
        return plain
    return {name: _tree(x, inside) for name, x in _parts(value).items()}


def _leaf(value: Any) -> str | None:
    """What is one text: numbers, names, tensors; None for what has parts."""
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        return _hashed("tensor", whole.shape, whole.dtype, whole.view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, torch.device):
        return f"device {value.type}"  # its number is a rank's own
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, bytes | bytearray):
        return _hashed("bytes", (len(value),), "", bytes(value))
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return _hashed("array", value.shape, value.dtype, value.tobytes())
    if isinstance(value, float | complex | torch.dtype | re.Pattern) or not (_is_function(value) or _has(value)):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value), flags=re.IGNORECASE)
    return None


def _hashed(kind: str, shape: Iterable[int], dtype: Any, content: bytes) -> str:
    return f"{kind} {list(shape)} {dtype} {hashlib.sha256(content).hexdigest()[:16]}"


def _is_function(value: Any) -> bool:
    return isinstance(value, functools.partial | types.MethodType) or inspect.isroutine(value)


def _has(value: Any) -> bool:
    """Whether it holds attributes that Python can name."""
    return attrs.has(type(value)) or hasattr(value, "__dict__") or bool(_slots(value))


def _slots(value: Any) -> list[str]:
    given = [getattr(owner, "__slots__", ()) for owner in type(value).__mro__]
    names = [name for one in given for name in ((one,) if isinstance(one, str) else one)]
    return [name for name in names if name not in ("__weakref__", "__dict__")]


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, functools.partial):
        return {"class": "partial", "function": value.func, "arguments": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"class": "method", "function": value.__func__, "of": value.__self__}
    if isinstance(value, types.FunctionType):
        return _function(value)
    kind = type(value)
    if inspect.isroutine(value):
        return {"class": _name(kind), "function": _name(value)}
    if attrs.has(kind):
        names = [one.name for one in attrs.fields(kind) if one.init]
    elif is_dataclass(kind):
        names = [one.name for one in dataclass_fields(kind) if one.init]
    else:
        names = [*sorted(getattr(value, "__dict__", {})), *_slots(value)]
    return {"class": _name(kind)} | {name: getattr(value, name) for name in names if hasattr(value, name)}


def _function(value: types.FunctionType) -> dict[str, Any]:
    name, code = _name(value), value.__code__
    if value.__name__ == "<lambda>":
        name = f"{name} of line {code.co_firstlineno}"
    held: dict[str, Any] = {}
    for free, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        try:
            held[free] = cell.cell_contents
        except ValueError:  # not filled yet
            held[free] = None
    options = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__, "closure": held}
    return {"class": f"function {name}"} | {kind: given for kind, given in options.items() if given}


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
