"""JSON and TOML files as plain data, whatever they hold: every failure is a ParameterError."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sparseprefill.errors import ParameterError, printed

Made = TypeVar("Made")


MOST = 64 << 20
"""Bytes of a file, beyond which it is none of this library's."""


def read(path: str | Path, most: int = MOST) -> str:
    """The text of a file; ParameterError with the reason alone where there is none.

    Pipes and devices, which may never end, and files of more than `most` bytes are not read.
    """
    try:
        path = Path(path)
        found = path.stat()
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise ParameterError("is no regular file: pass the path of one")
        if stat.S_ISREG(found.st_mode) and found.st_size > most:
            raise ParameterError(f"has {found.st_size} bytes: pass a file of at most {most}")
        return path.read_text(encoding="utf-8")
    except ParameterError:
        raise
    except OSError as error:
        raise ParameterError(error.strerror or "cannot be read") from error
    except UnicodeDecodeError as error:
        raise ParameterError("is not a text file: pass one in UTF-8") from error
    except ValueError as error:  # a path with a null byte, or with half of a character
        raise ParameterError(f"is not a path ({error}): pass the path of a file") from error


def loads(text: str) -> Any:
    """As `json.loads`; ParameterError for an object that has a key twice, of which one would be lost."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ParameterError(f"has the key {printed(twice)} twice in one object: remove one of them")
    return made


@contextmanager
def bounded() -> Iterator[None]:
    """ParameterError where data is nested so deeply that Python cannot follow it."""
    try:
        yield
    except RecursionError as error:
        raise ParameterError("is nested too deeply: pass a file with fewer levels") from error


def parsed(text: str, loads: Callable[[str], Any] = loads, kind: str = "JSON") -> Any:
    """The content; ParameterError for a text that is none, too deep, with a key twice, or with integers of thousands of
    digits.
    """
    try:
        with bounded():
            return loads(text)
    except ParameterError:
        raise
    except ValueError as error:
        raise ParameterError(f"is not {kind} ({error}): pass a {kind} file") from error


def load(path: str | Path, name: str, remedy: str, make: Callable[[object], Made]) -> Made:
    """What `make` makes of a JSON file's content; ParameterError names the file and the field that does not fit.

    name, remedy: what the file is, and what to pass instead of one that cannot be read.
    """
    try:
        text = read(path)
    except ParameterError as error:
        raise ParameterError(f"{name} is {printed(str(path))}: {error}; {remedy}") from error
    try:
        with bounded():
            return make(parsed(text))
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from error


def check_version(facts: Mapping[str, Any], schema: str, version: int, remedy: str = "") -> None:
    """ParameterError, with the remedy, where an object is of another schema or version."""
    for name, wanted in (("schema", schema), ("version", version)):
        if facts.get(name) != wanted or isinstance(facts.get(name), bool):
            said = f"{name} is {printed(facts.get(name))}: this library reads {printed(wanted)}"
            raise ParameterError(f"{said}; {remedy}" if remedy else said)


def by_lines(facts: Mapping[str, Any]) -> str:
    """The text of an object, a line for each of its fields."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in facts.items()]
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"
