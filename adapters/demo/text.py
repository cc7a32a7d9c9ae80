"""Filler text, taken from the Python installation at hand: topics that ``help()`` shows, and docstrings.

The repository stores none of it. Other Python versions give slightly other text, and so other tasks for the same seed.
"""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"})
_SHORTEST, _LONGEST = 16, 120
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


@lru_cache(maxsize=1)
def text_lines() -> tuple[str, ...]:
    """Return the filler text as lines, always in the same order.

    A line holds printable ASCII only, with single spaces, and has neither a
    space nor a line break at its ends.
    """
    texts = dict.fromkeys([*_topics(), *_docstrings()])
    return tuple(line for text in texts for line in _clean(text))


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    for key in sorted(topics):
        yield topics[key]


def _docstrings() -> Iterator[str]:
    paths: list[Path] = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        yield from _docstrings_of(path)


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    level: list[ast.AST] = [tree]
    while level:  # in the order of `ast.walk`, which also looks into expressions: most of a tree, and no docstring
        for node in level:
            if isinstance(node, _DOCUMENTED):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield docstring
        level = [child for node in level for child in ast.iter_child_nodes(node) if isinstance(child, _BLOCKS)]


def _clean(text: str) -> Iterator[str]:
    for raw in text.splitlines():
        line = " ".join(raw.split())
        fits = _SHORTEST <= len(line) <= _LONGEST
        if fits and line.isascii() and line.isprintable() and "magic number" not in line:
            yield line
