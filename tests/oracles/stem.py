"""Stem's two parts in plain loops, over sets and Python's numbers; shares no code with the refiners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction


def budget(i: int, n: int, tiles: int | None, share: float | None, decay: float) -> int:
    """Key tiles of the query tile that ends in key tile i of n, in exact fractions; shares to six decimals."""
    first = _first(n, tiles, share)
    if i < first:
        return first  # all that it can see
    steps = n - first - 1
    if steps <= 0:
        return first
    fallen = first + Fraction(i - first, steps) * (Fraction(str(round(decay, 6))) - 1) * first
    return max(1, min(first, math.floor(fallen)))


def _first(n: int, tiles: int | None, share: float | None) -> int:
    if tiles is not None:
        return min(tiles, n)
    if share is not None:
        return max(1, math.floor(n * Fraction(str(round(share, 6)))))
    if n < 56:
        return n
    return math.floor(Fraction(n, 5)) + 30 if n < 160 else math.floor(Fraction(n, 10)) + 30


def decayed(
    have: set[int], ends: set[int], worth: Mapping[int, float], columns: Mapping[int, float], room: int, k: int
) -> tuple[set[int], set[int]]:
    """Tiles and columns that one query tile keeps.

    have: key tiles of k tokens that the plan holds. ends: those that stay in any case. worth, columns: scores per key,
    of these tiles and of the stripes outside `ends`. room: tiles of the budget, after those of a carry.
    """
    room = max(0, room) * k
    order = sorted(have, key=lambda j: (-worth[j], -j))
    number = 0
    for count, j in enumerate(order, 1):
        better = sum(x > worth[j] for x in columns.values())
        outside = sum(y // k not in order[:count] for y in columns)
        if count * k + min(better, outside) <= room:
            number = count
    kept = set(order[:number])
    left = sorted((y for y in columns if y // k not in kept), key=lambda y: (-columns[y], -y))
    return kept | ends, set(left[: room - number * k])


def bonuses(values: Sequence[Sequence[float]], position: int, pool: int, beta: float) -> list[float]:
    """What each pool of keys gets for queries from a position on; values: of the keys on the row's grid."""
    norms = [math.sqrt(math.fsum(x * x for x in value)) for value in values]
    logs = [_log(norms[first : first + pool]) for first in range(0, len(norms), pool)]
    known = [x for n, x in enumerate(logs) if (n + 1) * pool <= position and math.isfinite(x)]
    if len(known) < 2:
        return [0.0] * len(logs)
    mean = math.fsum(known) / len(known)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / (len(known) - 1))
    return [
        beta * max(0.0, (x - mean) / (spread + 1e-6)) if (n + 1) * pool <= position and math.isfinite(x) else 0.0
        for n, x in enumerate(logs)
    ]


def _log(norms: Sequence[float]) -> float:
    return math.nan if any(math.isnan(x) for x in norms) else math.log(max(norms) + 1e-6)


def tile_weight(bonus: Sequence[float], j: int, tile: int, pool: int, position: int) -> float:
    """Factor on the score of key tile j: of the mean over its pools before the position."""
    inside = [n for n in range(j * tile // pool, (j + 1) * tile // pool) if (n + 1) * pool <= position]
    return math.exp(math.fsum(bonus[n] for n in inside) / len(inside)) if inside else 1.0
