"""A chip's kernel is a folder and a record: the rest of the code does not know its name."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import re

import pytest

from house.test_layers import PLACES, ROOT

CHIP = re.compile("hopper", re.IGNORECASE)
OWN = ("core/sparseprefill/kernels/hopper/", "core/sparseprefill/kernels/family/shipped.py", "plugins/rowmax/")
"""The kernel's folder, the list with its record, and the plugin with a kernel of its own for the same chip."""
UPSTREAM = re.compile(r"triton\.experimental\.gluon\.(language\.)?nvidia\.hopper")
"""Modules of Triton, which names them so."""


def named(text: str) -> list[str]:
    """Lines that name the chip."""
    return [line for line in text.splitlines() if CHIP.search(UPSTREAM.sub("", line))]


def test_no_other_file_names_the_chip() -> None:
    files = [path for place in PLACES.values() for path in sorted(place.rglob("*")) if path.suffix in (".py", ".jinja")]
    paths = {path.relative_to(ROOT).as_posix(): path for path in files}
    found = {name: named(path.read_text(encoding="utf-8")) for name, path in paths.items() if not name.startswith(OWN)}
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
