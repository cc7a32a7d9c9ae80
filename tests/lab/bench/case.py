"""What is measured: a call's inputs, and a random mask or a method that runs on it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from operator import or_
from types import MappingProxyType
from typing import Any, Literal

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError
from sparseprefill.mask.mask import SparseMask
from sparseprefill.pages import Pages
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import Registry
from sparseprefill.route import Route
from sparseprefill.testing.heads import head_tensors
from sparseprefill.testing.inputs import tensors
from sparseprefill.validate import number, one_of, whole

from .shape import Shape

STRENGTH = 14.0
"""By how much planted logits stand out in the plain kinds of inputs."""
TILE, GROUP, COLUMN = 128, 16, 16
"""Tokens of a random mask's tile; query tiles that share their stripes; tokens of a wide stripe."""
LAYERS: Mapping[str, int] = MappingProxyType({"kascade": 32})
"""Layers of a prefill that are run, where a method does not do the same in each."""


def inputs(
    kind: str, shape: Shape, length: int, seed: int, device: torch.device, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of prompts, by `sparseprefill.testing.tensors`, or by `head_tensors` for the kind "heads"."""
    sizes: dict[str, Any] = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    place: dict[str, Any] = {"device": device, "dtype": shape.torch_dtype}
    if kind != "heads":
        lengths: dict[str, Any] = {"batch": batch, "q_len": length, "kv_len": length}
        return tensors(kind, strength=STRENGTH, seed=seed, **lengths, **sizes, **place)
    rows = [head_tensors(q_len=length, seed=seed + i, **sizes, **place) for i in range(batch)]
    if batch == 1:
        return rows[0]
    q, k, v = (torch.cat(some) for some in zip(*rows, strict=True))
    return q, k, v


@lru_cache(maxsize=1)
def call_of(shape: Shape, kind: str, seed: int, device: torch.device) -> AttentionCall:
    """q, k, v of a kind (`inputs`) on a device; the last call made is kept."""
    q, k, v = inputs(kind, shape, shape.length, seed, device, shape.batch)
    if shape.batch == 1:
        return AttentionCall(q[:, :, -shape.queries :], k, v)
    return AttentionCall(q, k, v, lengths=torch.tensor(shape.lengths, dtype=torch.int32, device=device))


def in_pages(call: AttentionCall, page: int, seed: int) -> AttentionCall:
    """The call with K and V side by side in pages of a cache, in random order; heads side by side within a token."""
    _, heads, length, size = call.k.shape
    count, value = -(-length // page), call.value_dim
    source = torch.Generator(call.q.device).manual_seed(seed)
    table = torch.randperm(count, generator=source, device=call.q.device)
    cache = call.k.new_zeros(count, page, heads, size + value)
    token = torch.arange(length, device=table.device)
    cache[table[token // page], token % page] = torch.cat([call.k, call.v], -1)[0].transpose(0, 1)
    k, v = cache.split([size, value], -1)
    pages = Pages(k, v, table.to(torch.int32), length)
    return evolve(call, k=pages, v=pages)


@frozen
class Part:
    """Tiles of 128 x 128, stripes before each group of 2,048 rows, or columns of 16 keys before each query tile, at
    random; the diagonal tiles; or everything."""

    kind: str = field(validator=one_of("full", "diagonal", "tiles", "stripes", "columns"))
    share: float = field(default=1.0, validator=number(0.0, 1.0))

    def __str__(self) -> str:
        return self.kind if self.kind in ("full", "diagonal") else f"{self.kind} {self.share:.3g}"

    def mask(self, call: AttentionCall, source: torch.Generator) -> SparseMask:
        """A mask of this part alone, drawn from a generator on the call's device."""
        g, device = call.geometry, source.device
        if self.kind == "full":
            return SparseMask.full(call, TILE)
        if self.kind == "diagonal":
            return SparseMask.from_rules(call, TILE, band=0)
        if self.kind == "tiles":
            sizes = (g.batch, g.heads, g.tile_rows(TILE), g.tile_columns(TILE))
            return SparseMask.from_tiles(call, torch.rand(*sizes, generator=source, device=device) < self.share, TILE)
        # Before each group, as AnchorAttention selects them, or each query tile, as rowmax; without the diagonal.
        group, width = (GROUP, 1) if self.kind == "stripes" else (1, COLUMN)
        groups, columns = g.tile_rows(TILE * group), g.tile_columns(width)
        keep = torch.empty(g.batch, g.heads, groups, columns, dtype=torch.bool, device=device)
        for row in range(g.batch):  # a head at a time: drawn at once, the numbers would take gigabytes
            for head in range(g.heads):
                keep[row, head] = torch.rand(groups, columns, generator=source, device=device) < self.share
        before = g.tiles(TILE * group)[..., None] * TILE * group // width
        keep &= (torch.arange(columns, device=device) < before)[:, None]
        return evolve(SparseMask.from_stripes(call, keep, group, diagonal=False, width=width), disjoint=True)


def parse_mask(text: str) -> tuple[Part, ...]:
    """Parts of a mask such as ``full``, ``tiles:0.1``, or ``diagonal+stripes:0.05``; ParameterError else."""
    parts = []
    for one in text.split("+"):
        found = re.fullmatch(r"\s*(?:(full|diagonal)|(tiles|stripes|columns):([0-9.eE-]+))\s*", one)
        try:
            if found is None:
                raise ValueError
            parts.append(Part(found[1]) if found[1] else Part(found[2], float(found[3])))
        except ValueError:
            what = "full, diagonal, tiles:SHARE, stripes:SHARE or columns:SHARE with a share from 0 to 1, joined by +"
            raise ParameterError(f"mask is {text!r}: pass {what}, such as tiles:0.05+stripes:0.05") from None
    return tuple(parts)


def random_mask(call: AttentionCall, parts: Sequence[Part], seed: int) -> SparseMask:
    """The union of the parts, always the same for a seed and a device."""
    source = torch.Generator(call.q.device).manual_seed(seed)
    mask = reduce(or_, [part.mask(call, source) for part in parts])
    # Stripes stand before their group's tiles.
    apart = {part.kind for part in parts} in ({"diagonal", "stripes"}, {"diagonal", "columns"})
    return evolve(mask, disjoint=True) if apart else mask


@frozen(kw_only=True)
class Case:
    """One row of a table: a random mask through the executor alone, or a method's whole call.

    table: that it belongs to. name: of the method, or the mask as text. input: kind of inputs, of `call_of`. pipeline:
    of a method, None for a mask. parameters: those that differ from the method's defaults. gate: whether the break-even
    gate may choose dense. layers: of a prefill that stand behind the figures, all on the same inputs, which are their
    mean: for methods whose layers do different things. precision: of the executor, for masks.
    """

    table: str = ""
    name: str
    shape: Shape
    input: str = "heads"
    mask: tuple[Part, ...] = ()
    pipeline: Pipeline | Route | None = field(default=None, eq=False)
    parameters: Mapping[str, Any] = field(factory=dict, eq=False)
    gate: bool = False
    layers: int = field(default=1, validator=whole())
    precision: Literal["call", "int8"] = "call"

    @property
    def label(self) -> str:
        """The name, with what differs from the defaults."""
        said = [f"{name}={value}" for name, value in self.parameters.items()]
        said += ["gated"] if self.gate else []
        said += ["8 bits"] if self.precision == "int8" else []
        said += [f"mean of {self.layers} layers"] if self.layers > 1 else []
        return f"{self.name} ({', '.join(said)})" if said else self.name

    def __str__(self) -> str:
        sizes = "" if self.shape == evolve(Shape(length=2), length=self.shape.length) else f" {self.shape}"
        return re.sub(r"[^\w.=()%+/, -]", "", f"{self.label} {self.shape.length}{sizes}")


def of_mask(text: str, shape: Shape, table: str = "", **more: Any) -> Case:
    """A random mask through the executor, on Gaussian inputs; ParameterError for a text that is none."""
    mask = parse_mask(text)
    return Case(table=table, name=" + ".join(map(str, mask)), shape=shape, input="random", mask=mask, **more)


def of_method(registry: Registry, name: str, shape: Shape, table: str = "", **more: Any) -> Case:
    """A method at its defaults, or with ``parameters``, on inputs of several heads; errors as of `Registry.build`."""
    given = more.pop("parameters", {})
    layers = more.pop("layers", None) or LAYERS.get(name, 1)
    pipeline = registry.build(name, **{**registry.get(name).stand_in, **given})
    return Case(table=table, name=name, shape=shape, pipeline=pipeline, parameters=given, layers=layers, **more)
