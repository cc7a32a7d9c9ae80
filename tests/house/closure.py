"""What a module imports, and what that imports: `python -m house.closure`, run in tests, prints it for `compare`.

Imports inside functions and those for type checkers count: whoever reads a command to its end passes all of them. Each
line names a module of ours and the one that brings it. An argument is another module, such as
``sparseprefill.adapters.cli.fit``.
"""

from __future__ import annotations

import sys

from house.test_rooms import arrows

COMPARE = "sparseprefill.adapters.cli.compare"


def closure(graph: dict[str, set[str]], start: str) -> dict[str, str]:
    """Every module that one leads to, itself included, by the module that brings it first, breadth first."""
    found = {start: ""}
    waiting = [start]
    for one in waiting:
        for other in sorted(graph[one] - found.keys()):
            found[other] = one
            waiting.append(other)
    return found


def main() -> None:
    """Print the closure, by the module that brings each."""
    start = sys.argv[1] if sys.argv[1:] else COMPARE
    found = closure(arrows(), start)
    for module, by in sorted(found.items(), key=lambda one: (one[1], one[0])):
        sys.stdout.write(f"{by.removeprefix('sparseprefill.'):40} {module.removeprefix('sparseprefill.')}\n")
    sys.stdout.write(f"{len(found)} modules\n")


if __name__ == "__main__":
    main()
