"""Words of the code: a chip's name stays in its folder, and docstrings begin with a noun or a verb.

A chip's kernel is a folder and a record: the rest of the code does not know its name.
"""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from house.test_layers import PLACES, ROOT

KERNELS = PLACES["core"] / "kernels"
CHIPS = sorted(
    path.parent.name for path in KERNELS.glob("*/record.py") if path.parent.name not in ("attention", "family")
)
"""Folders of kernels for one chip, by whose names the chips go."""
OWN = (*(f"core/sparseprefill/kernels/{chip}/" for chip in CHIPS), "core/sparseprefill/kernels/family/shipped.py")
"""Their files, and the list with their records."""
ROWMAX = "plugins/rowmax/"
"""The plugin with a kernel of its own for Hopper."""
UPSTREAM = re.compile(r"triton\.experimental\.gluon\.(language\.)?nvidia\.\w+")
"""Modules of Triton, which names them so."""


def named(text: str) -> list[str]:
    """Lines that name a chip."""
    chips = re.compile("|".join(CHIPS), re.IGNORECASE)
    return [line for line in text.splitlines() if chips.search(UPSTREAM.sub("", line))]


def test_no_other_file_names_a_chip() -> None:
    assert "hopper" in CHIPS
    files = [path for place in PLACES.values() for path in sorted(place.rglob("*")) if path.suffix in (".py", ".jinja")]
    paths = {path.relative_to(ROOT).as_posix(): path for path in files}
    others = {name: path for name, path in paths.items() if not name.startswith((*OWN, ROWMAX))}
    found = {name: named(path.read_text(encoding="utf-8")) for name, path in others.items()}
    assert {} == {name: lines for name, lines in found.items() if lines}


def test_a_chip_is_known_by_its_facts_and_not_by_numbers() -> None:
    """Records of kernels have ranks by capability; what else differs between chips stands in `family/chips.py`."""
    paths = [path for place in PLACES.values() for path in sorted(place.rglob("*.py")) if path.name != "chips.py"]
    compared = re.compile(r"capability(\(.*\))? (==|!=|>=|<=|>|<|in) \(?\d|capability(\(.*\))? in \(")
    found = {path.relative_to(ROOT).as_posix(): compared.findall(path.read_text(encoding="utf-8")) for path in paths}
    assert {} == {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from sparseprefill.kernels.hopper import launch", 1),
        ("on Hopper", 1),
        ("HOPPER_INT8", 1),
        ("a chip", 0),
        ("from triton.experimental.gluon.language.nvidia.hopper import mbarrier", 0),
    ],
)
def test_the_rule_itself(text: str, count: int) -> None:
    assert count == len(named(text))


FRAGMENTS = ("What", "Whether", "How", "Why", "Where", "Which", "When", "Who")
"""Words that begin a clause, where a docstring has a noun or a verb."""


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of the module, classes and functions, and those below a name."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, one in zip([None, *node.body], node.body, strict=False):
            said = one.value.value if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) else None
            if isinstance(said, str) and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                yield one.lineno, said


def clauses(text: str) -> list[int]:
    """Lines of the docstrings that begin with a clause."""
    return [line for line, said in docstrings(text) if said.split(maxsplit=1)[:1] and said.split()[0] in FRAGMENTS]


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    files = [path for place in PLACES.values() for path in sorted(place.rglob("*.py"))]
    found = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in files]
    assert [] == [f"{name}:{line}" for name, text in found for line in clauses(text)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""What it is."""', [1]),
        ('"""Whatever it is."""', []),
        ('def one():\n    """Why not, or None."""\n', [2]),
        ('def one():\n    """The reason, or None."""\n', []),
        ('LEAST = 1\n"""How many at least."""\n', [2]),
        ('print()\n"""How a loose text is no docstring."""\n', []),
    ],
)
def test_the_rule_of_docstrings_itself(text: str, lines: list[int]) -> None:
    assert lines == clauses(text)
