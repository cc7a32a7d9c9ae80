"""Floors of core: a room, which is a file or folder at its top, stands one floor above all that it imports.

Imports inside functions, for type checkers and by a string count as any other. `python -m house.floors` (from tests/)
prints the floors, the imports that run up instead, and the files that have them.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

from house.test_rooms import arrows

UPWARD = {
    ("call", "mask"): "the geometry of a call, on which its masks are built as well, and the word to a recording",
    ("mask", "kernels"): "launches, imported where they run; kernels name masks as types",
    ("pages", "kernels"): "the launch that gathers pages; kernels name pages as types",
}
"""Imports from a lower floor to a higher one: of two rooms that name each other, the way that is not counted."""


def room(module: str) -> str | None:
    """The room of core that holds a module; None for one of plugins and adapters."""
    first = module.split(".")[1:2]
    return "__init__" if not first else None if first[0] in ("plugins", "adapters") else first[0]


def between_rooms() -> dict[str, set[str]]:
    """Which rooms of core each room imports, for type checkers and inside functions included."""
    found: dict[str, set[str]] = {}
    for module, others in arrows().items():
        here = room(module)
        if here is not None and here != "__main__":
            there = {name for name in map(room, others) if name is not None}
            found.setdefault(here, set()).update(there - {here})
    return found


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room, from 1: one above the highest that it imports. CycleError for a circle of rooms."""
    found: dict[str, int] = {}
    for one in TopologicalSorter(graph).static_order():
        found[one] = 1 + max((found[other] for other in graph.get(one, ())), default=0)
    return found


def downward() -> dict[str, set[str]]:
    """The imports between rooms without those that run up."""
    return {one: {other for other in others if (one, other) not in UPWARD} for one, others in between_rooms().items()}


def upward() -> list[tuple[str, str]]:
    """The arrows that run up: each file that imports a higher room, with that room."""
    found = {(module, room(other)) for module, others in arrows().items() for other in others}
    return sorted((module, there) for module, there in found if there is not None and (room(module), there) in UPWARD)


if __name__ == "__main__":
    found = floors(downward())
    for floor in range(max(found.values()), 0, -1):
        print(f"{floor:2} ", *sorted(one for one, at in found.items() if at == floor))  # noqa: T201
    for (one, other), why in UPWARD.items():
        print(f"up  {one} -> {other}: {why}")  # noqa: T201
    for module, there in upward():
        print(f"    {module} -> {there}")  # noqa: T201
