"""Content of a plan: its tensors, and all else that decides what is done with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from types import MethodType
from typing import Any

import torch
from attrs import fields, has
from torch import Tensor

from sparseprefill.errors import ParameterError
from sparseprefill.mask.geometry import Geometry

VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Classes of what is told by its value."""
TENSOR = "tensor"


def content(plan: Any, geometry: Geometry) -> tuple[Hashable, list[Tensor]] | None:
    """A plan for a call of a geometry as a value, and its tensors, whose places that names; None where it holds what
    has no value, such as a function that makes its mask when it is read. Nothing is read on the device."""
    tensors = list[Tensor]()

    def told(x: Any) -> Hashable:
        if isinstance(x, Tensor):
            tensors.append(x)
            return TENSOR
        if isinstance(x, VALUES):
            return type(x), x
        if x is geometry:
            return Geometry
        if isinstance(x, list | tuple):
            return type(x), tuple(map(told, x))
        if isinstance(x, Mapping):
            return Mapping, tuple((name, told(value)) for name, value in x.items())
        if isinstance(x, MethodType):
            return x.__func__, told(x.__self__)
        if has(type(x)):
            return type(x), tuple(told(getattr(x, name)) for name in _names(type(x)))
        raise ParameterError(type(x).__name__)

    try:
        return told(plan), tensors
    except ParameterError:
        return None


def _given(kind: Any) -> tuple[str, ...]:
    """Names of all that an object of a class was made from."""
    return tuple(one.name for one in fields(kind) if one.init)


_names: Callable[[Any], tuple[str, ...]] = cache(_given)
