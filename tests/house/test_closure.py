"""How much of the house a reader of one command passes."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from house.closure import COMPARE, closure
from house.test_rooms import arrows

MOST = 133
"""Modules of ours behind `compare`, those that it imports late included."""


def test_a_closure_has_what_is_reached_by_its_first_way() -> None:
    graph = {"a": {"b", "c"}, "b": {"d"}, "c": {"d", "a"}, "d": set(), "e": {"a"}}
    assert {"a": "", "b": "a", "c": "a", "d": "b"} == closure(graph, "a")


def test_compare_stands_on_few_modules() -> None:
    found = closure(arrows(), COMPARE)
    assert len(found) <= MOST, "see python -m house.closure"
