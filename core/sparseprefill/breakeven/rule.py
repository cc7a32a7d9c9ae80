"""From measured sizes to any size: how long a method takes, over dense attention, by sizes alone.

Between measured sizes the logarithm of the ratio is linear in the logarithm of the length. Beyond them the rule is
conservative: a call with less work than any that was measured is charged the whole sparse time, while dense attention
gets its share of the pairs; a call with more work keeps the ratio of the largest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from attrs import frozen

from sparseprefill.breakeven.points import HeadShape, Point

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


def nearest(shapes: Sequence[HeadShape], sizes: Sizes) -> HeadShape | None:
    """The measured shape by which such a call is judged: of its kind of number, the nearest in size."""
    kind = _bits(sizes.dtype)
    fitting = [shape for shape in shapes if _bits(shape.dtype) == kind]
    return min(fitting, key=lambda shape: _distance(shape, sizes), default=None)


def lines(shape: HeadShape, method: str) -> tuple[Line, ...]:
    """The ratios of one method: chunks by ascending rows, whole prompts last; empty if nothing is known.

    A method that was not measured counts with the executor alone at its sparsest: no mask of it can take less.
    """
    known = [point for point in shape.points if method in point.methods]
    ratio = _unmeasured if not known else _doubtful(method) if too_dense(shape, method) else _measured(method)
    found: dict[int, list[tuple[int, float]]] = {}
    for point in known or shape.points:
        value = ratio(point)
        if value is not None:
            found.setdefault(0 if point.whole else point.queries, []).append((point.keys, value))
    whole = found.pop(0, [])
    if not whole:
        return ()
    chunks = [Line(queries, *_columns(rows)) for queries, rows in sorted(found.items())]
    return (*chunks, Line(None, *_columns(whole)))


def too_dense(shape: HeadShape, method: str) -> bool:
    """Whether the inputs, and not the size, kept a method from winning: no length won, the longest still dense."""
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
            a, b, x, y = whole.keys[i], whole.keys[i + 1], whole.ratios[i], whole.ratios[i + 1]
            return math.ceil(a * math.exp(math.log(b / a) * math.log(GAIN / x) / math.log(y / x)))
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
    below: tuple[int, float] | None = None
    for line in along:
        rows = keys if line.queries is None else line.queries
        if line.queries is not None and rows >= keys:
            continue
        ratio = line.at(keys)
        if queries <= rows:
            if below is None:
                return ratio * pairs(rows, keys) / pairs(queries, keys)
            return between(queries, below[0], rows, below[1], ratio) if below[0] < rows else ratio
        below = rows, ratio
    return along[-1].at(keys)


def _measured(method: str) -> Callable[[Point], float | None]:
    return lambda point: point.methods[method].seconds / point.dense


def _doubtful(method: str) -> Callable[[Point], float | None]:
    def ratio(point: Point) -> float:
        one = point.methods[method]
        work = point.executor_at(min(one.density, UNSURE))
        return (one.seconds if work is None else min(one.seconds, one.estimate + work)) / point.dense

    return ratio


def _unmeasured(point: Point) -> float | None:
    return point.executor[0][1] / point.dense if point.executor else None


def _columns(rows: list[tuple[int, float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(keys for keys, _ in rows), tuple(ratio for _, ratio in rows)


def _distance(shape: HeadShape, sizes: Sizes) -> tuple[float, float]:
    width = abs(math.log2(sizes.head_dim / shape.head_dim))
    heads = math.log2(sizes.batch * sizes.heads / shape.heads)
    group = abs(math.log2(sizes.heads * shape.kv_heads / (sizes.kv_heads * shape.heads)))
    # Of two as near, the one with no more work than the call: its ratio needs no correction.
    return width + abs(heads) + group / 2, float(heads < 0)


def _bits(dtype: str) -> int:
    return {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}.get(dtype, 0)
