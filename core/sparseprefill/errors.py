"""The errors that the library raises on purpose, and how messages show values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)
LONGEST = 400
"""Characters of a value that a message shows."""
_ONE = r"0x[0-9a-fA-F]+|\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?"
NUMBER = re.compile(rf"(?<![\w.])({_ONE})(?: to ({_ONE}))?(?!\.?\d)")
"""A number in a message, or a span of numbers, that is no part of a name or a version."""


def extra(name: str) -> str:
    """The command that installs an extra, for errors. No index has the package, so it is from a clone."""
    return f'pip install -e ".[{name}]" in a clone of sparseprefill'


class SparsePrefillError(Exception):
    """Base of everything this library raises on purpose.

    Errors can be pickled, so that they reach the caller of a worker process: what they hold comes back as it was,
    whatever their classes are made from.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), self.__dict__.copy()


class InvalidCallError(SparsePrefillError, ValueError):
    """An argument of an attention call is wrong; the message names the field, the value and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"AttentionCall.{field} is {value}: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy


class MaskError(SparsePrefillError, ValueError):
    """A mask does not fit its call, or its index lists break the contract."""


class ParameterError(SparsePrefillError, ValueError):
    """A parameter of a method or stage is unknown or out of bounds."""


class UnsupportedCallError(SparsePrefillError):
    """A stage cannot honour a feature of this call, such as a window or a dtype. `reasons` lists every objection."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class StageError(SparsePrefillError):
    """A stage, a gate or a kernel raised a foreign exception or returned nonsense; the message names it."""


class UnknownMethodError(SparsePrefillError, LookupError):
    """No registered method has this name; the message lists the nearest."""


class MethodCollisionError(SparsePrefillError):
    """Two plugins offer a method of the same name."""


class PluginLoadError(SparsePrefillError):
    """A plugin failed to load; raised from the original error when its method is asked for."""


class AttachError(SparsePrefillError):
    """An adapter cannot bind this model; the message gives the reason."""


def _holds_tensors(value: object) -> bool:
    names = [one.name for one in getattr(type(value), "__attrs_attrs__", ())]
    inner = value if isinstance(value, list | tuple) else [getattr(value, name, None) for name in names]
    return any(type(one).__name__ in ("Tensor", "Parameter") for one in inner)


def printed(value: object) -> str:
    """The value as messages show it, on one page whatever it is.

    Tensors by dtype and shape, without reading their values; what holds some, such as a call or a model, by its type;
    long texts cut; integers of thousands of digits, and objects whose own `repr` fails, by their type.
    """
    kind = type(value).__name__
    if getattr(value, "is_nested", False) is True:  # which has no shape to show
        return f"a nested {kind} of {getattr(value, 'dtype', '')}"
    if kind in ("Tensor", "Parameter"):
        return f"a {kind} of {getattr(value, 'dtype', '')} {tuple(getattr(value, 'shape', ()))}"
    if hasattr(value, "named_parameters") or _holds_tensors(value):
        return f"{kind}(...)"
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except Exception:  # of a stranger's class; integers too long for Python to write
        return f"{kind} of {value.bit_length()} bits" if isinstance(value, int) else f"a {kind} that cannot be printed"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def told(error: object) -> str:
    """An error's message, or any object as text; its type where its own `str` fails."""
    try:
        return str(error)
    except Exception:
        return f"a {type(error).__name__} that cannot be printed"


def frameless(error: E) -> E:
    """The error, and those that it was raised from, without their tracebacks: frames hold the call's tensors, and
    whoever keeps an error keeps them."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += one.__cause__, one.__context__
    return error


def printable(error: BaseException) -> bool:
    """True if an error can say what it has to say."""
    try:
        str(error)
    except Exception:
        return False
    return True


def _again(kind: type[SparsePrefillError], args: tuple[Any, ...]) -> SparsePrefillError:
    """An error with its message, without its constructor; what it holds besides comes by its state."""
    return kind.__new__(kind, *args)


def numberless(text: str) -> str:
    """A message without its numbers: one text for all sizes, where each text costs."""
    return NUMBER.sub("N", text)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'theta'? Known: block, step, theta`` for error messages."""
    names = sorted(known)
    close = get_close_matches(word, names, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{hint} Known: {', '.join(names) or 'none'}"
