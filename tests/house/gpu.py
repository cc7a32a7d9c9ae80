"""Moves on the path that a GPU takes: kernels compiled for an H100, and a driver that does nothing with their launches.

`python -m house.gpu METHOD...` (from tests/), of a layer behind others in its step: 8,192 rows behind 8,192 keys,
12 / 2 heads of 128, bfloat16; vLLM's keys stand in pages of 16. A transformers model reads 8,192 tokens.
"""

from __future__ import annotations

import sys

import torch

from lab.host import idle

SIZES = {"tokens": 16384, "before": 8192, "heads": 12, "kv_heads": 2, "width": 128, "dtype": torch.bfloat16}


def main(arguments: list[str]) -> None:
    """Print a line for each host and method; with --moves each move, too."""
    idle()
    from helpers.walk import layer_walk
    from house.moves import Sizes, vllm_moves

    of = Sizes(**SIZES)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    for method in (one for one in arguments if one != "--moves"):
        for label, walk in (
            ("vLLM", vllm_moves(method, of)),
            ("transformers", layer_walk(method, tokens=of.rows, heads=of.heads, kv_heads=of.kv_heads, dtype=of.dtype)),
        ):
            counts = f"{len(walk.moves)} moves, {len(walk.files)} files, {walk.calls} calls"
            print(f"gpu {label} layer {method}: {counts}")  # noqa: T201
            if "--moves" in arguments:
                print("\n".join(f"  {a or '(outside)'} -> {b}  {by}" for a, b, by in walk.moves))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
