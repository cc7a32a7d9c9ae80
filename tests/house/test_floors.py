"""Core stays low: few floors, and few imports that run up."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from graphlib import CycleError

import pytest

from house.floors import UPWARD, between_rooms, downward, floors, upward


def test_core_has_few_floors() -> None:
    found = floors(downward())
    assert max(found.values()) <= 13, found


def test_few_imports_run_up() -> None:
    assert len(UPWARD) <= 3
    assert len(upward()) <= 4, upward()
    rooms = between_rooms()
    assert [] == [(one, other) for one, other in UPWARD if other not in rooms[one]], "these are gone: take them out"


def test_an_import_upward_makes_a_circle_of_rooms() -> None:
    assert {"a": 3, "b": 2, "c": 1} == floors({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    with pytest.raises(CycleError):
        floors({"a": {"b", "c"}, "b": {"c"}, "c": {"a"}})
