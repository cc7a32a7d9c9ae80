"""Whether what stands under an implementation's name is transformers' own, or a function that a user put there.

A user's own attention may differ from plain attention anywhere, such as behind the longest text that a dry run could
try, so nothing but transformers' own is replaced. It is told by where a function's code and its names come from, not by
its name: `functools.wraps` copies that, and `AttentionInterface.register` takes any.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn import functional

HOME = "transformers"
KNOWN = frozenset({HOME, "torch", "builtins", *sys.stdlib_module_names} - {"__main__"})
PLACES = (torch, functional)
"""Modules whose functions an attention function calls as attributes, and that people patch."""
DEEPEST = 8
"""Functions within functions; transformers nests two or three."""


def foreign(function: Any) -> str:
    """Name of what is not transformers' own in a function: itself, what it wraps, or a function that it calls by name.

    Empty where all is.
    """
    if odd := next(_odd(function, 0), ""):
        return odd
    inner = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    if isinstance(inner, FunctionType) and _root(inner) == HOME:
        return next(_patched(inner), "")
    return _name(inner)


def _patched(function: FunctionType) -> Iterator[str]:
    """Functions of others that a function meets under names of its file, or under torch's."""
    for name in function.__code__.co_names:
        for value in (function.__globals__.get(name), *(vars(place).get(name) for place in PLACES)):
            yield from _odd(value, 0)


def _odd(value: Any, depth: int) -> Iterator[str]:
    """Names of functions that neither transformers nor torch nor Python brings, in a function and what it closes over.

    Classes, modules and whatever cannot be called are no functions.
    """
    if not callable(value) or isinstance(value, type) or depth > DEEPEST:
        return
    if isinstance(value, functools.partial):
        yield from _odd(value.func, depth + 1)
        if depth == 0:
            yield _name(value)
        return
    if isinstance(value, MethodType):
        value = value.__func__
    if _root(value) not in KNOWN:
        yield _name(value)
    elif isinstance(value, FunctionType):
        for part in _closed_over(value):
            yield from _odd(part, depth + 1)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    """Values that a function closes over, those in tuples and lists one by one; and what a decorator says it wraps."""
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield from held if isinstance(held, tuple | list) else (held,)
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield wrapped


def _root(value: Any) -> str:
    """The package that a function comes from; empty where its code is from elsewhere than its names."""
    if not isinstance(value, FunctionType):
        said = value.__module__ if isinstance(value, BuiltinFunctionType) else type(value).__module__
        return "builtins" if said is None else str(said).partition(".")[0]
    module = str(value.__globals__.get("__name__", ""))
    root = module.partition(".")[0]
    if root != HOME:
        return root
    # A pickled or compiled file may lie elsewhere; the end of its path is that of the module.
    path, inside = value.__code__.co_filename.replace("\\", "/"), module.replace(".", "/")
    here = getattr(sys.modules.get(module), "__dict__", None) is value.__globals__
    return root if here and path.endswith((f"{inside}.py", f"{inside}/__init__.py")) else ""


def _name(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"functools.partial of {_name(value.func)}"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', None) or type(value).__module__}.{name}"
