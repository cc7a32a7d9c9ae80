"""Text of JSON and TOML files as plain data, whatever they hold: every failure is a ParameterError."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparseprefill.errors import ParameterError


def read(path: str | Path) -> str:
    """The text of a file; ParameterError with the reason alone where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ParameterError(error.strerror or "cannot be read") from error
    except UnicodeDecodeError as error:
        raise ParameterError("is not a text file: pass one in UTF-8") from error
    except ValueError as error:  # a path with a null byte, or with half of a character
        raise ParameterError(f"is not a path ({error}): pass the path of a file") from error


@contextmanager
def bounded() -> Iterator[None]:
    """ParameterError where data is nested so deeply that Python cannot follow it."""
    try:
        yield
    except RecursionError as error:
        raise ParameterError("is nested too deeply: pass a file with fewer levels") from error


def parsed(text: str, loads: Callable[[str], Any] = json.loads, kind: str = "JSON") -> Any:
    """The content; ParameterError for a text that is none, too deep, or with integers of thousands of digits."""
    try:
        with bounded():
            return loads(text)
    except ParameterError:
        raise
    except ValueError as error:
        raise ParameterError(f"is not {kind} ({error}): pass a {kind} file") from error
