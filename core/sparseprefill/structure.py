"""Plain data, as JSON and TOML files hold it, and attrs classes: one reader, one writer, errors with the field."""

from __future__ import annotations

import json
import math
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from attrs import NOTHING, fields, frozen, has

from sparseprefill.errors import ParameterError, nearest, printed

Made = TypeVar("Made")
MOST = 64 << 20
"""Bytes of a file, beyond which it is none of this library's."""
KEY = "sparseprefill.key"
"""Metadata of a field that has another name in a file."""
REMEDY = re.compile(r"(?s)(.*: (?:pass|give) )(.+)")
"""A message's remedy, behind the value, which may hold any words."""
IN_PYTHON = re.compile(r"\b(?:True|False|None)\b")
IN_DATA = {"True": "true", "False": "false", "None": "null"}
KINDS: Mapping[type, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


@frozen
class Schema:
    """The mark of a class's files; the class has it as `SCHEMA`.

    name, version: stand in the file. remedy: for files of other versions. short: whether fields that have a default may
    be left out.
    """

    name: str
    version: int
    remedy: str
    short: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """The first two fields of a file."""
        return {"schema": self.name, "version": self.version}

    def check(self, facts: Mapping[str, Any], at: str = "") -> None:
        """ParameterError, with the remedy, where an object is of another schema or version."""
        for name, wanted in self.facts.items():
            found = facts.get(name)
            if found != wanted or isinstance(found, bool):
                path = join(at, name)
                raise ParameterError(f"{path} is {printed(found)}: this library reads {wanted!r}; {self.remedy}")


def structure(kind: Any, value: Any, at: str = "", *, short: bool = False) -> Any:
    """Read plain data as a `kind`: an attrs class, a list, a mapping, a number, or a text, as annotations say it.

    at: the path of the value, for messages. short: whether fields that have a default may be left out; a class with a
    `SCHEMA` says so itself. ParameterError names the field that does not fit, with its path, and what would do.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        check_finite(value, at)
        return value
    if origin is Annotated:
        return _checked(parts[0], parts[1], value, at, short=short)
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        (kind,) = (one for one in parts if one is not NoneType)
        return structure(kind, value, at, short=short)
    if origin is tuple:
        return _tuple(parts, value, at, short=short)
    if origin in (dict, Mapping):
        made = {}
        for key, one in table(value, at).items():
            path = join(at, str(key)) if parts[0] is str else f"{at}[{key}]"
            made[_key(parts[0], key, at)] = structure(parts[1], one, path)
        return made
    if has(kind):
        return _object(kind, value, at, short=short)
    good = isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not good:
        raise ParameterError(f"{at} is {printed(value)}: pass {KINDS[kind]}")
    return float(value) if kind is float and abs(value) <= sys.float_info.max else value


def unstructure(value: Any) -> Any:
    """Plain data that JSON can hold, and that `structure` reads back."""
    if has(type(value)):
        facts = {one.metadata.get(KEY, one.name): getattr(value, one.name) for one in fields(type(value)) if one.init}
        schema = getattr(type(value), "SCHEMA", None)
        value = facts if schema is None else {**schema.facts, **facts}
    if isinstance(value, Mapping):
        return {str(name): unstructure(one) for name, one in value.items()}
    return [unstructure(one) for one in value] if isinstance(value, list | tuple) else value


def _object(kind: Any, value: Any, at: str, *, short: bool) -> Any:
    schema: Schema | None = getattr(kind, "SCHEMA", None)
    facts = table(value, at)
    if schema is not None:
        schema.check(facts, at)
        facts = {name: one for name, one in facts.items() if name not in schema.facts}
        short = schema.short
    known = {str(one.metadata.get(KEY, one.name)): one for one in fields(kind) if one.init}
    check_names(facts, known, at)
    for name, field in known.items():
        if name not in facts and (field.default is NOTHING or not short):
            raise ParameterError(f"{join(at, name)} is missing: add it")
    made = {}
    for name, one in facts.items():
        field = known[name]
        path = join(at, name)
        made[field.name] = _checked(_hints(kind)[field.name], field.validator, one, path, short=short)
    try:
        return kind(**made)
    except ParameterError as error:
        raise ParameterError(join(at, for_data(str(error)))) from error


def _checked(kind: Any, check: Any, value: Any, at: str, *, short: bool) -> Any:
    """A value of a kind, checked by its validator first, whose message names the path."""
    if check is not None:
        try:
            check(None, SimpleNamespace(name=at), value)
        except ParameterError as error:
            raise ParameterError(for_data(str(error))) from error
    return structure(kind, value, at, short=short)


def _tuple(parts: tuple[Any, ...], value: Any, at: str, *, short: bool) -> Any:
    if not isinstance(value, list | tuple):
        raise ParameterError(f"{at} is {printed(value)}: pass a list")
    if parts[-1] is not Ellipsis and len(value) != len(parts):
        raise ParameterError(f"{at} is {printed(value)}: pass a list of {len(parts)}")
    kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
    pairs = zip(kinds, value, strict=True)
    return tuple(structure(kind, one, f"{at}[{i}]", short=short) for i, (kind, one) in enumerate(pairs))


def _key(kind: type, key: object, at: str) -> Any:
    if kind is str or isinstance(key, int):
        return key
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 and str(int(key)) == key:
        return int(key)
    raise ParameterError(f"{at} has the key {printed(key)}: pass an integer from 0")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def for_data(message: str) -> str:
    """A message on a value of a file or of a server's table, whose remedy says ``true or false`` and ``null`` where it
    says ``True or False`` and ``None`` to who writes Python."""
    found = REMEDY.fullmatch(message)
    if found is None:
        return message
    return found[1] + IN_PYTHON.sub(lambda one: IN_DATA[one[0]], found[2])


def join(at: str, name: str) -> str:
    """The path of a field within what stands at a path."""
    return f"{at}.{name}" if at else name


def table(value: object, at: str = "") -> Mapping[str, Any]:
    """A table, which JSON calls an object."""
    if not isinstance(value, Mapping):
        raise ParameterError(f"{at or 'the file'} is {printed(value)}: give a table of keys and values")
    return value


def check_names(facts: Mapping[str, Any], known: Collection[str], at: str = "") -> None:
    """ParameterError, with the nearest, for a table with another key than these."""
    for name in facts:
        if not isinstance(name, str):
            raise ParameterError(f"{at or 'the table'} has the key {printed(name)}: keys are names")
        if name not in known:
            raise ParameterError(f"{join(at, name)} is unknown{nearest(name, known)}")


def check_finite(value: object, at: str) -> None:
    """ParameterError for NaN and infinity, which Python reads from JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"{at} is {value}: pass a finite number")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            check_finite(inner, join(at, str(name)))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            check_finite(inner, f"{at}[{i}]")


def read(path: str | Path, most: int = MOST) -> str:
    """The text of a file; ParameterError with the reason alone where there is none.

    Pipes and devices, which may never end, and files of more than `most` bytes are not read.
    """
    if path == "":  # which is the working directory, as a Path
        raise ParameterError("names no file")
    try:
        path = Path(path)
        found = path.stat()
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise ParameterError("is no regular file: pass the path of one")
        if stat.S_ISREG(found.st_mode) and found.st_size > most:
            raise ParameterError(f"has {found.st_size} bytes: pass a file of at most {most}")
        return path.read_text(encoding="utf-8-sig")  # without the mark that some editors put first
    except ParameterError:
        raise
    except OSError as error:
        raise ParameterError(error.strerror or "cannot be read") from error
    except UnicodeDecodeError as error:
        raise ParameterError("is not a text file: pass one in UTF-8") from error
    except ValueError as error:  # a path with a null byte, or with half of a character
        raise ParameterError(f"is not a path ({error}): pass the path of a file") from error


def loads(text: str) -> Any:
    """The content of a JSON text; ParameterError for an object with a key twice, one of which would be lost."""
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


def parsed(text: str, loads: Callable[[str], Any] = loads, kind: str = "JSON", remedy: str = "") -> Any:
    """The content; ParameterError for a text that is none, too deep, with a key twice, or with integers of thousands of
    digits. remedy: for a text that is no file's.
    """
    try:
        with bounded():
            return loads(text)
    except ParameterError:
        raise
    except ValueError as error:
        raise ParameterError(f"is not {kind} ({error}): {remedy or f'pass a {kind} file'}") from error


def load(path: str | Path, name: str, remedy: str, make: Callable[[object], Made]) -> Made:
    """Make an object of a JSON file's content by `make`; ParameterError names the file and the field that does not fit.

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


def by_lines(made: Any) -> str:
    """The text of a file that holds an object of an attrs class, a line for each of its fields."""
    facts = unstructure(made)
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in facts.items()]
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"
