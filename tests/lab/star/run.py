"""The rows of the benchmark, the most important first."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from sparseprefill.adapters.star.api import attention_of
from sparseprefill.adapters.star.encode import Inner
from sparseprefill.adapters.star.layout import BLOCK, LONG, Layout, Sizes
from sparseprefill.adapters.star.ranks import Ranks

from lab.bench.clock import Run
from sparseprefill.registry import default_registry

from . import decode, layer, model
from .cost import Cost
from .inner import Seen
from .start import started
from .table import Table

INNER = ("rowmax", "anchor-attention", "flexprefill", "xattention", "streaming")
TIMEOUT = 60.0  # seconds without progress; the first row of a kernel compiles it


def bench(given: Namespace) -> None:
    """Measure and print; every rank runs it."""
    began = time.monotonic()
    with started(given.device, TIMEOUT) as device:
        ranks = Ranks(timeout=TIMEOUT)
        path = None if given.json is None else Path(given.json)
        table = Table(ranks, device, given.seconds, began, path, given.rows)
        shape = layer.LayerShape(device=device)
        if device.type == "cpu":
            shape = layer.LayerShape(heads=4, kv_heads=2, head_dim=64, dtype="float32", device=device)
        mesh = dist.device_mesh.init_device_mesh(device.type, (ranks.size,))
        name = _name(device)
        table.note(torch=torch.__version__, ranks=ranks.size, device=name, tokens=given.tokens)
        table.line(f"torch {torch.__version__}, {ranks.size} ranks, {name}; milliseconds of the slowest rank")
        table.line("| tokens | attention of one layer, unless it says layers | ms | speed-up | GiB | |")
        table.line("| ---: | --- | ---: | --- | ---: | --- |")
        Rows(table, shape, mesh, given.tokens).all()
        table.close()


@define(eq=False)
class Rows:
    """All of them. shape: of the layer. mesh: all ranks, in one dimension."""

    table: Table
    shape: layer.LayerShape
    mesh: Any
    lengths: list[int]

    def all(self) -> None:
        """In the order of their weight, since the budget may end early."""
        first, *rest = self.lengths
        longest = [tokens for tokens in rest if tokens > 2 * LONG]
        self.ring(first)
        self.ring(first, "alltoall")
        self.star(first, self.quarter(first))
        for name in INNER:
            self.star(first, self.quarter(first), name)
        for tokens in longest:
            self.prefill(tokens)
        self.decode(first, graphs=False)
        self.row(first, "dense, one GPU", partial(layer.one_gpu, self.shape, first), self.cost.dense(first))
        if self.shape.device.type == "cuda":
            self.layers(first)
            self.token(first)
            for tokens in longest:
                self.layers(tokens)
            self.decode(first, graphs=True)
            for tokens in rest:
                if tokens not in longest:
                    self.layers(tokens)
        for tokens in rest:
            if tokens not in longest:
                self.prefill(tokens)
        self.star(first, self.quarter(first), "pieces")
        for tokens in rest:
            self.row(tokens, "dense, one GPU", partial(layer.one_gpu, self.shape, tokens), self.cost.dense(tokens))
        if self.shape.device.type == "cuda":
            for tokens in rest:
                self.alone(tokens)

    @property
    def cost(self) -> Cost:
        """What rows may take."""
        return Cost(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.table.ranks.size

    def row(self, tokens: int, what: str, make: Callable[[], Run], seconds: float, **options: Any) -> None:
        """A row, with fewer rounds where one takes long."""
        options.setdefault("rounds", 5 if seconds < 0.5 else 3 if seconds < 1 else 1 if seconds < 4 else 0)
        self.table.row(tokens, what, make, seconds=seconds, **options)

    def quarter(self, tokens: int) -> Layout:
        """A block a rank: a quarter of the prompt on four."""
        return Sizes(tokens // self.size).layout(tokens, self.size)

    def blocks(self, tokens: int) -> Layout | None:
        """Blocks of 32K tokens, where those are smaller."""
        return Sizes(BLOCK).layout(tokens, self.size) if tokens // self.size > BLOCK else None

    def name(self, layout: Layout) -> str:
        """Of a layout."""
        return "blocks of 32K" if layout.count > self.size else f"blocks of 1/{self.size}"

    def prefill(self, tokens: int) -> None:
        """Attention through the ring and through Star."""
        self.ring(tokens)
        small = self.blocks(tokens)
        if small is not None:
            self.star(tokens, small)
            self.star(tokens, small, INNER[0])
        self.star(tokens, self.quarter(tokens))

    def ring(self, tokens: int, rotate: str = "allgather") -> None:
        """PyTorch's ring, by one of its two ways to pass keys on; rows are against the faster."""
        make = partial(layer.ring, self.shape, self.mesh, tokens, rotate)
        what = "ring" if rotate == "allgather" else f"ring, {rotate}"
        self.row(tokens, what, make, self.cost.dense(tokens, self.size), base="ring")

    def star(self, tokens: int, layout: Layout, inside: str = "") -> None:
        """Star: dense inside the blocks, or a method at its defaults on keys of which 5 % stand out."""
        ranks, note = self.table.ranks, ""
        inner: Inner = self.dense()
        tensors: layer.Tensors | None = None
        seen: Seen | None = None
        if inside == "pieces":
            inner, note = layer.pieces, "two of torch's kernels and a merge"
        elif inside:
            seen = Seen(default_registry().build(inside))
            inner, tensors = seen, self.shape.striped
        make = partial(layer.star, self.shape, ranks, layout, inner, tensors)
        what = f"star, {self.name(layout)}" + (f", {inside} inside" if inside else "")
        said = note.__str__ if seen is None else seen.note
        self.row(tokens, what, make, self.cost.star(layout), against="ring", note=said)

    def dense(self) -> Inner:
        """What `Star` runs inside a block unless told otherwise."""
        cuda = self.shape.device.type == "cuda"
        return attention_of(default_registry().build("dense") if cuda else None)

    def decode(self, tokens: int, *, graphs: bool) -> None:
        """A token of phase 2 against one GPU that holds all keys."""
        steps: dict[str, Callable[[], Run]] = {
            "dense decode, SDPA": lambda: decode.sdpa(self.shape, tokens),
            "dense decode, split keys": lambda: decode.split(self.shape, tokens),
            "star decode": lambda: decode.star(self.shape, self.table.ranks, tokens),
        }
        kind, repeat = (", in a graph", decode.graphed) if graphs else ("", decode.many)
        for name, make in steps.items():
            links = {"against": f"dense decode{kind}"} if name.startswith("star") else {"base": f"dense decode{kind}"}
            what = f"{name}, {decode.STEPS} steps{kind}"
            self.row(tokens, what, partial(decode.repeated, repeat, make), 0.1, **links)

    def layers(self, tokens: int) -> None:
        """A model's prefill over all ranks, and on one GPU at the first length."""
        linear = model.SHAPE.layers * self.cost.linear(tokens / self.size)
        ring = linear + model.SHAPE.layers * self.cost.dense(tokens, self.size)
        self.row(tokens, "layers, ring", partial(model.ring, self.mesh, self.shape.device, tokens), ring, base="layers")
        small = self.blocks(tokens)
        for layout, inside in ((small, ""), (small, "streaming"), (self.quarter(tokens), ""), (None, "")):
            if layout is not None:
                self.layers_star(tokens, layout, inside)
        if small is None:
            self.layers_star(tokens, self.quarter(tokens), "streaming")
        if tokens == self.lengths[0]:
            self.alone(tokens)

    def layers_star(self, tokens: int, layout: Layout, inside: str) -> None:
        """A model's prefill through `Star.encode`."""
        make = partial(model.star, self.shape.device, tokens, layout.block, inside or None, TIMEOUT)
        seconds = model.SHAPE.layers * (self.cost.linear(tokens / self.size) + self.cost.star(layout))
        what = f"layers, star, {self.name(layout)}" + (f", {inside} inside" if inside else "")
        self.row(tokens, what, make, seconds, against="layers")

    def alone(self, tokens: int) -> None:
        """A model's prefill on one GPU, where it fits."""
        seconds = model.SHAPE.layers * (self.cost.linear(tokens) + self.cost.dense(tokens))
        if tokens <= model.FITS:
            self.row(tokens, "layers, dense, one GPU", partial(model.dense, self.shape.device, tokens), seconds)

    def token(self, tokens: int) -> None:
        """A model's decoding: its whole forward pass, transformers' part included."""
        device, note = self.shape.device, f"{model.STEPS} tokens".__str__
        dense, star = partial(model.decode_dense, device, tokens), partial(model.decode_star, device, tokens, TIMEOUT)
        name = "layers, dense decode, one GPU"
        self.row(tokens, name, dense, 0.1, base=name, note=note)
        self.row(tokens, "layers, star decode", star, 0.1, against=name, note=note)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, small heads: no figures of use"
