"""The rows of the benchmark, the most important first."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.memory import Memory
from sparseprefill.metrics import recall
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Result
from sparseprefill.registry import default_registry

from ..api import attention_of
from ..layout import BLOCK, LONG, Sizes
from ..ranks import Ranks
from ..start import started
from . import decode, layer, model
from .table import Table

INNER = ("anchor-attention", "flexprefill", "xattention", "streaming")
TIMEOUT = 40.0


def bench(given: Namespace) -> None:
    """Measure and print; every rank runs it."""
    with started(given.device, "auto", TIMEOUT) as place:
        ranks = Ranks(timeout=TIMEOUT)
        table = Table(ranks, place.device, given.seconds)
        small = place.device.type == "cpu"
        shape = layer.Shape(device=place.device)
        if small:
            shape = layer.Shape(4, 2, 64, torch.float32, place.device)
        mesh = dist.device_mesh.init_device_mesh(place.device.type, (ranks.size,))
        table.line(
            f"torch {torch.__version__}, {ranks.size} ranks, {_name(place.device)}; milliseconds of the slowest rank"
        )
        table.line("| tokens | attention of one layer | ms | times the ring's speed | |")
        table.line("| ---: | --- | ---: | ---: | --- |")
        for tokens in given.tokens:
            _prefill(table, shape, mesh, tokens)
            if tokens == given.tokens[0]:
                _decode(table, shape, tokens)
                _sparse(table, shape, tokens)
        if not small:
            for tokens in given.tokens:
                _layers(table, mesh, tokens)
        for tokens in given.tokens:
            if tokens > LONG:
                table.row(tokens, "dense, one GPU", partial(layer.one_gpu, shape, tokens), rounds=0)


def _prefill(table: Table, shape: layer.Shape, mesh: Any, tokens: int) -> None:
    ranks, dense = table.ranks, attention_of(default_registry().build("dense"), table.ranks)
    if shape.device.type == "cpu":
        dense = attention_of(None, ranks)
    rounds = 3 if tokens <= LONG else 1 if tokens <= 2 * LONG else 0
    table.row(tokens, "ring", partial(layer.ring, shape, mesh, tokens), rounds=rounds)
    pieces = "two of torch's kernels and a merge".__str__
    for name, size in _sizes(tokens, ranks.size).items():
        make = partial(layer.star, shape, ranks, Sizes(size).layout(tokens, ranks.size))
        often = 3 if size <= BLOCK else rounds
        table.row(tokens, f"star, {name}", partial(make, dense), rounds=often)
        table.row(tokens, f"star, {name}, pieces", partial(make, layer.pieces), note=pieces, rounds=often)
    if tokens <= LONG:
        table.row(tokens, "dense, one GPU", partial(layer.one_gpu, shape, tokens), rounds=3)


def _sizes(tokens: int, ranks: int) -> dict[str, int]:
    """A block a rank (a quarter of the prompt on four), and 32K tokens where that is smaller."""
    found = {f"blocks of 1/{ranks}": tokens // ranks}
    return {**found, "blocks of 32K": BLOCK} if tokens // ranks > BLOCK else found


def _sparse(table: Table, shape: layer.Shape, tokens: int) -> None:
    """Methods at their defaults inside the blocks, on keys of which 5 % stand out."""
    ranks, layout = table.ranks, Sizes(tokens // table.ranks.size).layout(tokens, table.ranks.size)
    for name in INNER:
        seen = Seen(default_registry().build(name))
        what = f"star, blocks of 1/{ranks.size}, {name} inside"
        table.row(
            tokens, what, partial(layer.star, shape, ranks, layout, seen, shape.striped), note=seen.note, rounds=3
        )


@define(eq=False)
class Seen:
    """A method inside the blocks, and what it made of the last one."""

    pipeline: Pipeline
    last: tuple[AttentionCall, Result] | None = None

    def __call__(self, call: AttentionCall, memory: Memory) -> Tensor:
        """See Inner."""
        result = self.pipeline.run(call, memory)
        self.last = call, result
        return result.out

    def note(self) -> str:
        """Density and recall of the last block."""
        if self.last is None:
            return ""
        call, result = self.last
        return f"density {result.density:.3f}, recall {float(recall(call, result, rows=64).mean()):.3f}"


def _decode(table: Table, shape: layer.Shape, tokens: int) -> None:
    steps = {**decode.one_gpu(shape, tokens), "star decode": decode.star(shape, table.ranks, tokens)}
    for name, run in steps.items():
        table.row(tokens, f"{name}, {decode.STEPS} steps", partial(decode.many, run))
    if shape.device.type == "cuda":
        for name, run in steps.items():
            table.row(tokens, f"{name}, {decode.STEPS} steps in a graph", partial(decode.graphed, run))
    sent = 4 * (shape.width + 1) * shape.heads
    table.line(f"| {tokens:>8} | bytes that a rank sends for a token and layer | {sent} | | 4 (d + 1) a head |")


def _layers(table: Table, mesh: Any, tokens: int) -> None:
    for name, make in model.runs(table.ranks, mesh, table.device, tokens).items():
        table.row(tokens, name, make, note=f"{model.LAYERS} layers of 8B shape".__str__, rounds=int(tokens <= 2 * LONG))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, small heads: no figures of use"
