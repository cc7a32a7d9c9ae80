"""What kernels are compiled for, without a GPU and without compiling: ``python specialised.py METHOD...``.

Prints a JSON object for each method: of `served`, kernels that requests of a server would wait for although the engine
compiled what it knew of at its start, and of `lengths`, those that whole prompts of other lengths would. Run it without
TRITON_INTERPRET. A fake driver names capability 9.0, tensors lie on the CPU, and no launch runs: see `offline`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from sparseprefill.adapters.serving.layer import Layer
from sparseprefill.adapters.serving.warm import Sizes, warm
from sparseprefill.adapters.vllm.pages import pages_of
from torch import Tensor
from triton.runtime.jit import JITFunction

from kernels.offline import Target, known, pretend, replace
from sparseprefill import AttentionCall, Memory, Pages, Pipeline, default_registry, kernels
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.hopper import launch as hopper
from sparseprefill.kernels.hopper.record import HOPPER, HOPPER_INT8
from sparseprefill.kernels.lists import order
from sparseprefill.mask import looks

HEADS, KV_HEADS, WIDTH, PAGE, STEP = 8, 2, 128, 16, 8192
LONGEST = (3000, 8192, 32_784, 139_280)
WARM, LATER = (4096, 5001, 20_480), (7000, 9009, 12_288, 24_001)
DTYPE = torch.bfloat16
FIXED = ([(8190, 16_380)], [(2871, 8192)], [(133, 32_768)], [(200, 300)], [(2048, 2048), (2048, 8192), (4095, 4095)])
"""Steps that once were found to compile anew: rows and keys of each request."""


TILES = "rowmax, tiles"
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    TILES: ("rowmax", {"width": None, "union": "group", "every": 2, "eps": 0.02, "times": 1e9}),
}
"""Methods with other settings than their defaults, by a name of their own."""


def recording(seen: set[tuple[str, str]]) -> Callable[..., None]:
    """`JITFunction.run` that notes what a launch would be compiled for, and launches nothing."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        del grid, warmup
        *_, binder = self.device_caches[0]
        _, specialization, found = binder(*args, **options, debug=False)
        seen.add((self.fn.__name__, f"{specialization} {found}"))

    return run


def steps(longest: int, count: int = 8) -> list[list[tuple[int, int]]]:
    """Rows and keys of the requests of each step, drawn, with at most `STEP` rows."""
    draw, found = random.Random(0), [list(one) for one in FIXED]
    for _ in range(count):
        requests, left = draw.choice([1, 1, 2, 3]), min(STEP, longest)
        step = []
        for i in range(requests):
            most = left - 128 * (requests - i)
            if most > 128:
                rows = draw.choice([draw.randint(128, most), min(most, draw.choice([128, 512, 1024, 2048]))])
                behind = draw.choice([0, 0, rows, STEP, draw.randint(0, longest)])
                step.append((rows, min(longest, rows + behind)))
                left -= rows
        found.append(step)
    return [step for step in found if step and all(keys <= longest for _, keys in step)]


def served(pipeline: Pipeline, longest: int, seen: set[tuple[str, str]]) -> list[str]:
    """Kernels that steps would compile behind an engine's start."""
    layers = [Layer(index, WIDTH**-0.5, None, None, None) for index in range(2)]
    sizes = Sizes(
        query_heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, page=PAGE, stored=DTYPE, dtype=DTYPE, outside=False,
        step=STEP, longest=longest, device=torch.device("cpu"),
    )  # fmt: skip
    seen.clear()
    order.prepare.cache_clear()
    warm(pipeline, layers, sizes, pages)
    before, cache = set(seen), sizes.cache()
    for step in steps(longest):
        q = torch.empty(sum(rows for rows, _ in step), HEADS, WIDTH, dtype=DTYPE)
        memories = [Memory() for _ in step]
        parts = [part.transpose(0, 1)[None] for part in q.split([rows for rows, _ in step])]
        table = torch.zeros(-(-longest // PAGE), dtype=torch.int32)
        for layer in layers:
            calls = [
                AttentionCall.of_pages(part, pages(cache, table, keys), layer=layer.index, prompt_lengths=longest)
                for part, (_, keys) in zip(parts, step, strict=True)
            ]
            if len(calls) == 1:
                pipeline.run(calls[0], memories[0])
            else:
                pipeline.run_many(calls, memories)
    return sorted({name for name, _ in seen - before})


def pages(cache: Tensor, table: Tensor, keys: int) -> Pages:
    """As vLLM's adapter has them."""
    return pages_of(cache, WIDTH, table, keys, dtype=DTYPE)


def drawn(make: Callable[..., order.Draws], *given: Any) -> order.Draws:
    """Draws of programs, of which the launch that makes them is noted alone."""
    return order.Draws(*map(torch.zeros_like, make(*given)))


def lengths(pipeline: Pipeline, seen: set[tuple[str, str]]) -> list[str]:
    """Kernels that whole prompts of later lengths would compile behind the first ones."""

    def run(every: Sequence[int]) -> None:
        for length in every:
            q, k, v = (torch.empty(1, heads, length, WIDTH, dtype=DTYPE) for heads in (HEADS, KV_HEADS, KV_HEADS))
            memory = Memory()
            for layer in range(2):
                pipeline.run(AttentionCall(q, k, v, layer=layer), memory)

    seen.clear()
    run(WARM)
    before = set(seen)
    run(LATER)
    return sorted({name for name, _ in seen - before})


def main(methods: Sequence[str]) -> None:
    seen: set[tuple[str, str]] = set()
    pretend(Target())
    replace(AutoExecutor, choose=lambda *_: TritonExecutor())
    replace(AutoExecutor, execute_many=lambda _, calls, plans: TritonExecutor().execute_many(calls, plans))
    replace(kernels, serve=lambda _: True)
    known(HOPPER_INT8, HOPPER)
    replace(JITFunction, run=recording(seen))
    replace(looks, readable=lambda _: False)  # lists that nobody filled
    of_lists, of_requests = (partial(drawn, make) for make in (order.draws_of_lists, order.draws_of_requests))
    replace(hopper, draws_of_lists=of_lists, draws_of_requests=of_requests)
    registry = default_registry()
    found: dict[str, dict[str, Any]] = {}
    for name in methods:
        method, settled = MORE.get(name, (name, {}))
        pipeline = registry.build(method, **registry.get(method).stand_in, **settled)
        late = {longest: served(pipeline, longest, seen) for longest in LONGEST}
        found[name] = {"served": {str(one): names for one, names in late.items() if names}}
        found[name]["lengths"] = lengths(pipeline, seen)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
