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
PLAIN = frozenset(VALUES)
TENSOR = "tensor"


def content(plan: Any, geometry: Geometry) -> tuple[Hashable, list[Tensor]] | None:
    """A plan for a call of a geometry as a value, and its tensors, whose places that names; None where it holds what
    has no value, such as a function that makes its mask when it is read. Nothing is read on the device."""
    tensors = list[Tensor]()

    def told(x: Any) -> Hashable:
        kind = type(x)
        if kind in PLAIN or isinstance(x, VALUES):
            return kind, x
        if isinstance(x, Tensor):
            tensors.append(x)
            return TENSOR
        if x is geometry:
            return Geometry
        if names := _names(kind):
            return kind, tuple([told(getattr(x, name)) for name in names])
        if isinstance(x, list | tuple):
            return kind, tuple(map(told, x))
        if isinstance(x, Mapping):
            return Mapping, tuple((name, told(value)) for name, value in x.items())
        if isinstance(x, MethodType):
            return x.__func__, told(x.__self__)
        if has(kind):
            return kind, ()
        raise ParameterError(kind.__name__)

    try:
        return told(plan), tensors
    except ParameterError:
        return None


def _given(kind: Any) -> tuple[str, ...]:
    """Names of all that an object of a class was made from; none of a class that is not attrs'."""
    return tuple(one.name for one in fields(kind) if one.init) if has(kind) else ()


_names: Callable[[Any], tuple[str, ...]] = cache(_given)
