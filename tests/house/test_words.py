"""A chip's kernel is a folder and a record: the rest of the code does not know its name."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import re

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
