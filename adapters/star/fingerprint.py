"""Settings as plain values by their paths, the same wherever equal settings were made: in no process's words."""

from __future__ import annotations

import hashlib
import json
import re
import types
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor

NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def fingerprint(path: str, value: Any, above: tuple[int, ...] = ()) -> dict[str, Any]:
    """The part of a value that JSON can hold, by paths from its own on: no address, no device's number, no order of a
    set.

    An object is its class and its attributes, a function its module and name, a tensor its shape, type and hash.
    above: the values that this one is part of, by `id`.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return {path: value}
    if isinstance(value, NAMED):
        return {path: _name(value)}
    if id(value) in above:
        return {path: f"{_name(type(value))}, again"}
    inside = (*above, id(value))
    if isinstance(value, Set):
        return {path: sorted(json.dumps(fingerprint("", x, inside)) for x in value)}
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        content = hashlib.sha256(whole.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        return {path: f"tensor {list(whole.shape)} {whole.dtype} {content}"}
    if isinstance(value, torch.device):
        return {path: f"device {value.type}"}  # its number is a rank's own
    kind = _name(type(value))
    if isinstance(value, Mapping):
        kind, held = "a mapping", {f"{path}.{key}": x for key, x in value.items()}
    elif isinstance(value, list | tuple):
        kind, held = f"a list of {len(value)}", {f"{path}[{place}]": x for place, x in enumerate(value)}
    elif attrs.has(type(value)):
        held = {f"{path}.{one.name}": getattr(value, one.name) for one in attrs.fields(type(value)) if one.init}
    elif not isinstance(value, Enum) and getattr(value, "__dict__", None):
        held = {f"{path}.{name}": x for name, x in vars(value).items()}
    else:
        return {path: re.sub(r" at 0x[0-9a-f]+", "", repr(value), flags=re.IGNORECASE)}
    parts = (fingerprint(name, x, inside) for name, x in held.items())
    return {path: kind, **{name: x for part in parts for name, x in part.items()}}


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
