"""Validators for parameters; every message names the field, the value and what would do."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

from attrs import Attribute

from sparseprefill.errors import ParameterError, printed

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""Names of what plugins offer: methods, refiners, correctors and kernels."""
WIDEST = 1 << 63
"""Integers from it on are none for a device."""
LARGEST = (1 << 31) - 1
"""The most of what a device counts in 32 bits, such as heads, or entries of a list."""
MOST_TILE = 8192
"""Tokens of a tile."""
MOST_ROWS = LARGEST
"""The most rows of a tail of dense rows."""
LONGEST = 1e12
"""Tokens, as a number: no prompt is longer."""
FILE = "sparseprefill.file"
"""Metadata of a field that may hold the path of a file: the words that are no paths. `from_config` takes a relative
path in a configuration file from that file's folder: ``field(default=None, metadata={FILE: ("single",)})``."""
Check = Callable[[Any, "Attribute[Any]", Any], None]


def is_name(value: object) -> bool:
    """True if a value is a name of what a plugin offers: lower-case words joined by hyphens."""
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def is_whole(value: object, least: int = 0, most: int = WIDEST - 1) -> bool:
    """True if a value is an integer from `least` to `most`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """True if a value is a number from `least` to `most`; NaN, booleans and integers that no float holds are none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return least <= value <= most and (isinstance(value, float) or abs(value) <= sys.float_info.max)


def fitting(owner: str, fits: Callable[[Any], bool], remedy: str, words: str = "") -> Check:
    """A check that asks a test. owner: the class, which messages name before the field; empty to name the field alone.

    remedy: what to pass, for messages. words: what the field takes, for people; by default the remedy.
    """

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not fits(value):
            name = f"{owner}.{attribute.name}" if owner else attribute.name
            raise ParameterError(f"{name} is {printed(value)}: pass {remedy}")

    check.__doc__ = words or remedy
    return check


def whole(least: int = 1, most: int | None = None) -> Check:
    """An integer from `least` to `most`."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not is_whole(value, least, WIDEST - 1 if most is None else most):
            too_wide = most is None and isinstance(value, int) and value >= WIDEST
            bound = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
            bound = f"an integer from {least} to 2^63 - 1" if too_wide else bound
            raise ParameterError(f"{attribute.name} is {printed(value)}: pass {bound}")

    check.__doc__ = f"integer >= {least}" if most is None else f"integer {least} to {most}"
    return check


def tokens(least: int = 1) -> Check:
    """Tokens of a tile or block: no more than `MOST_TILE`, since a tile is computed and held whole."""
    return whole(least, MOST_TILE)


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    """A number, not NaN, from `least` to `most` (infinity allowed where the bounds allow it)."""
    words = f"number {least:g} to {most:g}"
    return fitting("", lambda value: is_number(value, least, most), f"a number from {least:g} to {most:g}", words)


def multiple_of(other: str, most: int | None = None) -> Check:
    """A positive integer, of at most `most`, that the field `other`, declared before, divides."""

    def check(owner: Any, attribute: Attribute[Any], value: Any) -> None:
        whole(1, most)(owner, attribute, value)
        if value % getattr(owner, other):
            remedy = f"pass a multiple of {other}, {getattr(owner, other)}"
            raise ParameterError(f"{attribute.name} is {printed(value)}: {remedy}")

    check.__doc__ = f"a multiple of {other}"
    return check


def flag() -> Check:
    """True or False."""
    return fitting("", lambda value: isinstance(value, bool), "True or False", "true or false")


def one_of(*names: str) -> Check:
    """One of a few words."""
    listed = " or ".join(f"'{name}'" for name in names)
    return fitting("", lambda value: isinstance(value, str) and value in names, listed)


def maybe(inner: Check) -> Check:
    """None, or what `inner` takes."""

    def check(owner: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is not None:
            inner(owner, attribute, value)

    check.__doc__ = f"{inner.__doc__}, or none"
    return check


def anything(words: str) -> Check:
    """Whatever the field's converter has made. words: what that takes, for people."""
    return fitting("", lambda value: True, words)
