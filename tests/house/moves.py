"""Moves of a tiny call: how often control passes from one file of the package to another, returns included.

`python -m house.moves` (from tests/) prints the counts; with the name of a method, each of its moves, too.
"""

from __future__ import annotations

import sys

from helpers.walk import Walk, layer_walk, pipeline_walk

TOKENS = 300
METHODS = ("dense", "rowmax", "anchor-attention", "flexprefill", "bfla")


def pipeline_moves(method: str) -> Walk:
    """Of the second ``pipeline(q, k, v)`` on a CPU."""
    return pipeline_walk(method, tokens=TOKENS)


def layer_moves(method: str) -> Walk:
    """Of one layer's attention in a transformers model on a CPU."""
    return layer_walk(method, tokens=TOKENS)


if __name__ == "__main__":
    for method in sys.argv[1:] or METHODS:
        for label, walk in (("pipeline", pipeline_moves(method)), ("transformers layer", layer_moves(method))):
            print(f"{label} {method}: {len(walk.moves)} moves, {len(walk.files)} files")  # noqa: T201
            if sys.argv[1:]:
                print("\n".join(f"  {a or '(outside)'} -> {b}  {by}" for a, b, by in walk.moves))  # noqa: T201
