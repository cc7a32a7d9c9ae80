"""What a layer's call takes of the host: `python -m lab.host` (from tests/) times it until its last launch is made.

On a GPU launches are real, and nobody waits for them. Without one, kernels are compiled for an H100 and a driver that
does nothing takes their launches, so that what PyTorch and the driver take on a GPU comes on top. Calls with launches
like the one before (`kernels.launch`) and with Triton's own take turns; of each the median is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import torch
from attrs import asdict, frozen

import sparseprefill as sp
from sparseprefill import Memory, Pipeline, kernels
from sparseprefill.kernels import launch


@frozen
class Host:
    """Microseconds of the host a call: ours, and where Triton makes every launch itself."""

    method: str
    rows: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    rounds: int
    ours: float
    triton: float

    def __str__(self) -> str:
        sizes = f"{self.method}, {self.rows:,} rows of {self.keys:,} keys, {self.heads} / {self.kv_heads} heads"
        times = f"{self.ours:.0f} us of the host a call, {self.triton:.0f} by Triton's own launches"
        return f"{sizes}, d {self.width}: {times}"


def idle() -> None:
    """From now on this process has an H100 that does nothing: kernels are compiled, and launched no further."""
    from kernels.offline import Loading, known, pretend, replace
    from sparseprefill.executors.auto import AutoExecutor
    from sparseprefill.executors.triton import TritonExecutor
    from sparseprefill.kernels.hopper.record import HOPPER

    pretend(Loading(lambda *_: None))
    known(HOPPER)
    executor = TritonExecutor()
    replace(AutoExecutor, choose=lambda *_: executor, execute_many=lambda _, *given: executor.execute_many(*given))
    replace(kernels, serve=lambda _: True, serve_device=lambda _: True, serve_rows=lambda _: True)


def measure(method: str, rows: int, keys: int, shape: tuple[int, int, int], rounds: int) -> Host:
    """Time calls of a layer, each of the same sizes."""
    heads, kv_heads, width = shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (
        torch.randn(1, count, length, width, dtype=torch.bfloat16, device=device)
        for count, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    pipeline: Any = sp.build(method)
    if device == "cpu":
        from attrs import evolve

        from sparseprefill.executors.triton import TritonExecutor

        pipeline = evolve(pipeline, executor=TritonExecutor())

    def seconds() -> float:
        return _timed(pipeline, sp.AttentionCall(q, k, v, q_offset=keys - rows))

    own, theirs = [], []
    for _ in range(rounds + 5):
        own.append(seconds())
        launch.FAILED.append(RuntimeError("left to Triton, to be timed"))
        theirs.append(seconds())
        launch.FAILED.clear()
    return Host(method, rows, keys, *shape, rounds, *(1e6 * median(each[5:]) for each in (own, theirs)))


def _timed(pipeline: Pipeline, call: sp.AttentionCall) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    pipeline.run(call, Memory())
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="rowmax")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--shape", type=int, nargs=3, default=(12, 2, 128), metavar=("HEADS", "KV_HEADS", "WIDTH"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        idle()
    found = measure(given.method, given.rows, given.keys, tuple(given.shape), given.rounds)
    print(json.dumps(asdict(found)) if given.json else found)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
