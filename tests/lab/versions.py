"""Times of two versions of the package in turns, each in a process of its own on one GPU (from tests/).

``pip install --no-deps --target OLD FOLDER`` makes the folder of a version. Then
``python -m lab.versions OLD NEW --tokens 32768 --tokens 131072 --json versions.json``
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MASKS = ("full", "tiles:0.1", "tiles:0.05", "stripes:0.1", "stripes:0.05")
METHODS = ("anchor-attention", "bfla", "flexprefill", "rowmax", "sample-attention", "vertical-slash", "xattention")
HEADS, KV_HEADS, SIZE, TILE, GROUP = 32, 8, 128, 128, 16
ROUND = 0.03
"""Seconds of calls in a row that a round takes at least."""


def worker() -> None:
    """A version's process: a case for each line that comes in, its milliseconds for each that goes out.

    It keeps to names that versions have in common.
    """
    import torch

    from sparseprefill import AttentionCall, Memory, Plan, SparseMask, default_registry
    from sparseprefill.executors.auto import AutoExecutor
    from sparseprefill.route import gated
    from sparseprefill.testing.heads import head_tensors

    def mask_of(text: str, call: AttentionCall) -> SparseMask:
        kind, _, share = text.partition(":")
        if kind == "full":
            return SparseMask.full(call, TILE)
        source = torch.Generator("cuda").manual_seed(0)
        tiles = -(-call.kv_len // TILE)
        if kind == "tiles":
            drawn = torch.rand(1, HEADS, tiles, tiles, generator=source, device="cuda") < float(share)
            return SparseMask.from_tiles(call, drawn, TILE)
        groups = -(-tiles // GROUP)
        keep = torch.empty(1, HEADS, groups, call.kv_len, dtype=torch.bool, device="cuda")
        for head in range(HEADS):
            keep[0, head] = torch.rand(groups, call.kv_len, generator=source, device="cuda") < float(share)
        return SparseMask.from_stripes(call, keep, GROUP, diagonal=False)

    def work(kind: str, name: str, tokens: int) -> Callable[[], object]:
        if kind == "mask":
            source = torch.Generator("cuda").manual_seed(0)
            q, k, v = (
                torch.randn(1, heads, tokens, SIZE, generator=source, device="cuda", dtype=torch.bfloat16)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            call = AttentionCall(q, k, v)
            plan, executor = Plan(mask_of(name, call)), AutoExecutor()
            return lambda: executor.execute(call, plan)
        sizes: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE, "q_len": tokens, "seed": 0}
        call = AttentionCall(*head_tensors(**sizes, device=torch.device("cuda"), dtype=torch.bfloat16))
        pipeline, memory = gated(default_registry().build(name), None), Memory()
        return lambda: pipeline.run(call, memory)

    def times(run: Callable[[], object], rounds: int) -> list[float]:
        def of(count: int) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / count

        of(2)
        count = max(1, min(50, round(1e3 * ROUND / of(1))))
        return [of(count) for _ in range(rounds)]

    ready: dict[tuple[str, str, int], Callable[[], object]] = {}
    for line in sys.stdin:
        kind, name, tokens = line.split()
        case = (kind, name, int(tokens))
        try:
            if case not in ready:
                ready.clear()
                torch.cuda.empty_cache()
                ready[case] = work(*case)
            found: dict[str, Any] = {"ms": statistics.median(times(ready[case], 3))}
        except Exception as error:  # told in the row
            found = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def start(folder: Path) -> subprocess.Popen[str]:
    """A worker that imports the package from a folder, and this file from where it is."""
    path = os.pathsep.join(filter(None, [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-c", "from lab.versions import worker; worker()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env={**os.environ, "PYTHONPATH": path})


def ask(one: subprocess.Popen[str], case: str) -> dict[str, Any]:
    """What a worker found of a case."""
    assert one.stdin is not None
    assert one.stdout is not None
    one.stdin.write(case + "\n")
    one.stdin.flush()
    found: dict[str, Any] = json.loads(one.stdout.readline() or '{"error": "the process is gone"}')
    return found


def parser() -> ArgumentParser:
    """The options."""
    made = ArgumentParser("lab.versions", description="Two versions of the package, timed in turns.")
    made.add_argument("old", type=Path, help="folder of a version")
    made.add_argument("new", type=Path, help="folder of another")
    made.add_argument("--tokens", type=int, action="append", help="of the prompt; repeat for several")
    made.add_argument("--mask", action="append", help="full, tiles:SHARE or stripes:SHARE; repeat for several")
    made.add_argument("--method", action="append", help="at its defaults; by default seven, none beside --mask")
    made.add_argument("--turns", type=int, default=5, help="of each version; the median counts")
    made.add_argument("--json", type=Path, help="a file for the figures")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table as Markdown, a row as soon as it is measured."""
    given = parser().parse_args(arguments)
    workers = [start(given.old.resolve()), start(given.new.resolve())]
    rows: list[dict[str, Any]] = []
    sys.stdout.write("| tokens | what | old, ms | new, ms | new / old |\n| --- | --- | ---: | ---: | ---: |\n")
    masks, methods = given.mask, given.method
    if not masks and not methods:
        masks, methods = MASKS, METHODS
    kinds = [*(("mask", name) for name in masks or ()), *(("method", name) for name in methods or ())]
    for tokens in given.tokens or (32768, 131072):
        for kind, name in kinds:
            turns = [[ask(one, f"{kind} {name} {tokens}") for one in workers] for _ in range(given.turns)]
            failed = [one["error"] for turn in turns for one in turn if "error" in one]
            row: dict[str, Any] = {"tokens": tokens, "name": name, "turns": turns}
            text = failed[0] if failed else ""
            if not failed:
                old, new = (statistics.median(turn[i]["ms"] for turn in turns) for i in (0, 1))
                row |= {"old": old, "new": new}
                text = f"{old:.3f} | {new:.3f} | {new / old:.3f}"
            rows.append(row)
            sys.stdout.write(f"| {tokens:,} | {name} | {text} |\n")
            sys.stdout.flush()
            if given.json is not None:
                given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for one in workers:
        one.kill()


if __name__ == "__main__":
    main()
