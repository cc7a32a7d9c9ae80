"""From measured sizes to any size: how long a method takes, over dense attention, by sizes alone.

Between measured sizes the logarithm of the ratio is linear in the logarithm of the length. Beyond them the rule is
conservative: a call with less work than any that was measured is charged the whole sparse time, while dense attention
gets its share of the pairs; a call with more work keeps the ratio of the largest.

The figures are times of one layer's attention, by shape (`HeadShape`) and by size of the call (`Point`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from attrs import field, frozen

from sparseprefill.errors import ParameterError
from sparseprefill.validate import fitting, is_number, is_whole, one_of, whole

MOST = 1 << 40
"""No size reaches it; products of sizes up to it are floats still."""
BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
"""Of a number, by PyTorch's name of its type."""


def _is_capability(value: Any) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2
    return value is None or (pair and all(is_whole(one, 0, MOST) for one in value))


SIZE = whole(1, MOST)
SECONDS = fitting("", lambda x: is_number(x, 1e-12, 1e12), "seconds, a finite number above 0 (1e-12 to 1e12)")
DENSITY = fitting("", lambda x: is_number(x, 5e-324, 1), "a share of the causal pairs, above 0 and up to 1")
CAPABILITY = fitting("", _is_capability, "two integers, such as [9, 0], or null")


def device_type(device: torch.device) -> str:
    """PyTorch's name of a device's type, but "rocm" for AMD's GPUs, which PyTorch calls "cuda" too.

    The one place that knows: kernels, launch settings and tables tell AMD from NVIDIA by it.
    """
    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


@frozen(kw_only=True)
class DeviceKind:
    """The kind of device that a table was measured on. Calls on a device of this type and capability are judged by it.

    type: as `device_type` has it, such as "cuda", "rocm" or "cpu". capability: CUDA's compute capability, or what
    PyTorch reports in its place for "rocm"; None elsewhere. name: for people.
    """

    type: str
    capability: tuple[int, int] | None = field(default=None, validator=CAPABILITY)
    name: str = ""

    def like(self, other: DeviceKind) -> bool:
        """True if what was measured on one holds for the other: names say nothing."""
        return (self.type, self.capability) == (other.type, other.capability)

    def __str__(self) -> str:
        kind = self.type if self.capability is None else f"{self.type} {self.capability[0]}.{self.capability[1]}"
        return f"{self.name} ({kind})" if self.name else kind


@frozen(kw_only=True)
class MethodTime:
    """One method at one size: seconds of the whole call, of the estimator within, and the density that it chose."""

    seconds: float = field(validator=SECONDS)
    estimate: float = field(validator=SECONDS)
    density: float = field(validator=DENSITY)


@frozen
class Ran:
    """The executor's time at a density."""

    density: float = field(validator=DENSITY)
    seconds: float = field(validator=SECONDS)


def _ran(given: Iterable[Ran | tuple[float, float]]) -> tuple[Ran, ...]:
    return tuple(one if isinstance(one, Ran) else Ran(*one) for one in given)


@frozen(kw_only=True)
class Point:
    """One size of call, batch 1, the queries being the last of the keys.

    queries, keys: rows and tokens. dense: seconds of dense attention. executor: (density, seconds) of the sparse
    executor on random tiles, ascending. methods: by name.

    Raises ParameterError where a figure is out of bounds, or densities do not ascend.
    """

    queries: int = field(validator=SIZE)
    keys: int = field(validator=SIZE)
    dense: float = field(validator=SECONDS)
    executor: tuple[Ran, ...] = field(default=(), converter=_ran)
    methods: Mapping[str, MethodTime] = field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        if self.queries > self.keys:
            remedy = "there cannot be more queries than keys; pass at most the keys"
            raise ParameterError(f"queries is {self.queries}: {remedy}")
        for i, (before, one) in enumerate(pairwise(self.executor), 1):
            if one.density <= before.density:
                words = f"densities must ascend, and {before.density} comes before"
                raise ParameterError(f"executor[{i}].density is {one.density}: {words}")

    @property
    def whole(self) -> bool:
        """True if the call is a whole prompt; else it is a chunk behind others."""
        return self.queries == self.keys

    def executor_at(self, density: float) -> float | None:
        """Seconds of the executor at a density: linear between those measured, the nearest beyond; None without any."""
        if not self.executor:
            return None
        least, most = self.executor[0], self.executor[-1]
        if density <= least.density:
            return least.seconds
        for one, other in pairwise(self.executor):
            if density <= other.density:
                share = (other.seconds - one.seconds) * (density - one.density) / (other.density - one.density)
                return one.seconds + share
        return most.seconds


@frozen(kw_only=True)
class HeadShape:
    """Points of one shape of heads, by ascending (queries, keys). dtype: PyTorch's name, such as "bfloat16".

    Raises ParameterError where the sizes do not fit, or points repeat, do not ascend, or hold no whole prompt.
    """

    heads: int = field(validator=SIZE)
    kv_heads: int = field(validator=SIZE)
    head_dim: int = field(validator=SIZE)
    dtype: str = field(validator=one_of(*BITS))
    points: tuple[Point, ...]

    def __attrs_post_init__(self) -> None:
        if not self.points:
            raise ParameterError("points is []: pass a list with at least one entry")
        if self.heads % self.kv_heads:
            raise ParameterError(f"heads is {self.heads}: pass a multiple of the {self.kv_heads} kv_heads")
        for before, one in pairwise(self.points):
            if (before.queries, before.keys) >= (one.queries, one.keys):
                was, given = f"{before.queries} x {before.keys}", f"{one.queries} x {one.keys}"
                raise ParameterError(f"points has {given} after {was}: sizes must ascend by queries, then keys")
        if not any(point.whole for point in self.points):
            raise ParameterError("points has no size with as many queries as keys: add whole prompts")

    def knows(self, method: str) -> bool:
        """True if the method of this name was measured at one size or more."""
        return any(method in point.methods for point in self.points)

    def __str__(self) -> str:
        return f"{self.heads} / {self.kv_heads} heads, d {self.head_dim}, {self.dtype}"


GAIN = 0.95
"""Predicted ratio to dense up to which a call runs sparse: the rest is room for error of measurement."""
UNSURE = 0.5
"""Density that a method counts with where the calibration's inputs were too dense for it at every length."""
TELLING = 32768
"""Keys from which density tells of the inputs: below, windows and blocks of fixed size fill a short prompt."""


@frozen(kw_only=True)
class Sizes:
    """Sizes of a call. keys: up to its last query."""

    batch: int = 1
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    queries: int
    keys: int


@frozen
class Line:
    """Ratios to dense along a growing number of keys. queries: rows of a chunk; None for whole prompts."""

    queries: int | None
    keys: tuple[int, ...]
    ratios: tuple[float, ...]

    def at(self, keys: int) -> float:
        """The ratio at so many keys."""
        i = bisect_right(self.keys, keys)
        if i == len(self.keys):
            return self.ratios[-1]
        if i == 0:
            first = self.keys[0]
            share = pairs(self.queries or keys, keys) / pairs(self.queries or first, first)
            return self.ratios[0] / share
        return between(keys, self.keys[i - 1], self.keys[i], self.ratios[i - 1], self.ratios[i])


def nearest(shapes: Sequence[HeadShape], sizes: Sizes, method: str = "") -> HeadShape | None:
    """The measured shape by which such a call is judged: of its kind of number, the nearest in size; of those that know
    the method, where some do."""
    alike = [shape for shape in shapes if BITS[shape.dtype] == BITS.get(sizes.dtype)]
    known = [shape for shape in alike if shape.knows(method)]
    return min(known or alike, key=lambda shape: _distance(shape, sizes), default=None)


def lines(shape: HeadShape, method: str) -> tuple[Line, ...]:
    """The ratios of one method: chunks by ascending rows, whole prompts last; empty if nothing is known.

    A method that was not measured counts with the executor alone at its sparsest: no mask of it can take less.
    """
    known = [point for point in shape.points if method in point.methods]
    doubtful = too_dense(shape, method)
    found: dict[int | None, dict[int, float]] = {}
    for point in known or shape.points:
        seconds = _seconds(point, method, doubtful=doubtful)
        if seconds is not None:
            found.setdefault(None if point.whole else point.queries, {})[point.keys] = seconds / point.dense
    if None not in found:
        return ()
    order = (*sorted(queries for queries in found if queries is not None), None)
    return tuple(Line(queries, tuple(found[queries]), tuple(found[queries].values())) for queries in order)


def too_dense(shape: HeadShape, method: str) -> bool:
    """True if the inputs, and not the size, kept a method from winning: no length won, the longest still dense."""
    whole = [point for point in shape.points if point.whole and method in point.methods]
    if not whole or whole[-1].keys < TELLING:
        return False
    if any(point.methods[method].seconds <= GAIN * point.dense for point in whole):
        return False
    return whole[-1].methods[method].density > UNSURE


def ratio_of(shape: HeadShape, along: Sequence[Line], sizes: Sizes) -> float | None:
    """Predicted time of a call over that of dense attention; None where nothing is known."""
    if not along:
        return None
    share = sizes.batch * sizes.heads * sizes.head_dim / (shape.heads * shape.head_dim)
    return _by_rows(along, sizes.queries, sizes.keys) / min(1.0, share)


def from_length(along: Sequence[Line]) -> int | None:
    """The least prompt from which every longer one runs sparse, in tokens; None where the longest runs dense."""
    if not along or along[-1].ratios[-1] > GAIN:
        return None
    whole = along[-1]
    for i in range(len(whole.keys) - 1, -1, -1):
        if whole.ratios[i] > GAIN:
            return math.ceil(between(GAIN, *whole.ratios[i : i + 2], *whole.keys[i : i + 2]))
    # Below the shortest the ratio grows as dense attention's work shrinks.
    target = pairs(whole.keys[0], whole.keys[0]) * whole.ratios[0] / GAIN
    return math.ceil((math.sqrt(8.0 * target + 1.0) - 1.0) / 2.0)


def pairs(queries: int, keys: int) -> float:
    """Causal pairs of the last `queries` of `keys` tokens."""
    return queries * keys - queries * (queries - 1) / 2


def between(x: float, a: float, b: float, at_a: float, at_b: float) -> float:
    """A power law through two points."""
    return at_a * math.exp(math.log(at_b / at_a) * math.log(x / a) / math.log(b / a))


def _by_rows(along: Sequence[Line], queries: int, keys: int) -> float:
    """The ratio of the last `queries` of so many keys: between lines of fewer and of more rows.

    A line of chunks that begins behind so many keys is none of them: whole prompts are measured below.
    """
    known = [(line.queries, line) for line in along if line.queries is not None]
    known = [(count, line) for count, line in known if count < keys >= line.keys[0]] + [(keys, along[-1])]
    rows, beside = [count for count, _ in known], [line for _, line in known]
    i = bisect_left(rows, queries)
    ratio = beside[i].at(keys)
    if i == 0:
        return ratio * pairs(rows[0], keys) / pairs(queries, keys)
    return between(queries, rows[i - 1], rows[i], beside[i - 1].at(keys), ratio)


def _seconds(point: Point, method: str, *, doubtful: bool) -> float | None:
    """The time of a method; that of the sparsest mask where it was not measured, None where nothing was.

    doubtful: whether its densities are the inputs' fault, so that it counts with `UNSURE` at most.
    """
    if method not in point.methods:
        return point.executor[0].seconds if point.executor else None
    one = point.methods[method]
    work = point.executor_at(min(one.density, UNSURE)) if doubtful else None
    return one.seconds if work is None else min(one.seconds, one.estimate + work)


def _distance(shape: HeadShape, sizes: Sizes) -> tuple[float, float]:
    width = abs(math.log2(sizes.head_dim / shape.head_dim))
    heads = math.log2(sizes.batch * sizes.heads / shape.heads)
    group = abs(math.log2(sizes.heads * shape.kv_heads / (sizes.kv_heads * shape.heads)))
    # Of two as near, the one with no more work than the call: its ratio needs no correction.
    return width + abs(heads) + group / 2, float(heads < 0)
