"""Settings as plain values that are the same wherever equal settings were made: in no process's words."""

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


def fingerprint(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A value as a tree of JSON: no address, no device's number, no order of a set.

    An object is its class and its attributes, a function its module and name, a tensor its shape, type and hash.
    above: the values that this one is part of, by `id`.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, NAMED):
        return _name(value)
    if id(value) in above:
        return {"class": _name(type(value)), "again": True}
    inside = (*above, id(value))
    if isinstance(value, Mapping):
        return {str(key): fingerprint(x, inside) for key, x in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list | tuple):
        return [fingerprint(x, inside) for x in value]
    if isinstance(value, Set):
        return sorted((fingerprint(x, inside) for x in value), key=json.dumps)
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        content = hashlib.sha256(whole.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        return f"tensor {list(whole.shape)} {whole.dtype} {content}"
    if isinstance(value, torch.device):
        return f"device {value.type}"  # its number is a rank's own
    if attrs.has(type(value)):
        held = {one.name: getattr(value, one.name) for one in attrs.fields(type(value)) if one.init}
    elif not isinstance(value, Enum) and getattr(value, "__dict__", None):
        held = vars(value)
    else:
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value), flags=re.IGNORECASE)
    return {"class": _name(type(value)), **{name: fingerprint(x, inside) for name, x in held.items()}}


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
