"""rowmax by its rule, row by row and key by key: slow, float64, one head at a time.

Shares no code with the plugin. The rule:

- Tiles of `block` tokens lie on the batch row's own grid, position 0 being its first real token.
- Of query tile t of the layer's query head h, the rows looked at stand at ``t * block + (t + h) % every``, then every
  `every` tokens to the tile's end; of these, the queries that there are. Under a union, heads share the rows: with n
  the largest power of two that is no larger than the KV head's number of query heads, and for which every * n divides
  the block, a head looks at one row in ``every * n``, from ``t * block + (t + h * every) % (every * n)`` on; if n is 1,
  as without a union.
- Keys lie in columns of `width` tokens on the same grid, tiles where no width is given.
- m[J] is a row's largest logit in column J, over the keys that it may see: none behind it, under a sliding window those
  in the window. A softcap is applied to logits.
- The share of a column is ``exp(m[J] - log(sum of exp(m[J'])))``, the sum over all columns with a key to see; the logit
  of a sink joins the sum.
- A column is kept if one row of the query tile gives it a share of eps or more, or of `times` times the mean of the
  columns that the row may see. Under a union, if one row of any query head of the KV head does. Without one, a row
  that keeps it with a share of `strong` or more, below 1, keeps it for all query heads of the KV head.
- All keys of the query tile's own tile are kept always, those of the first tile where `sink` is set. 0 for eps or for
  times keeps everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from oracles.classic import Keep


@dataclass(frozen=True)
class Parameters:
    """The options of the method."""

    eps: float
    every: int
    block: int
    sink: bool = True
    union: str = "head"
    width: int | None = None
    times: float = 1e9
    strong: float = 1.0


@dataclass(frozen=True)
class Head:
    """One head of one batch row, without its padding: Q stands at positions first, first + 1, ..."""

    Q: Tensor
    K: Tensor
    first: int
    scale: float
    number: int
    group: int
    softcap: float | None = None
    window: int | None = None
    sink: float | None = None

    def logit(self, query: int, key: int) -> float:
        """Of two positions."""
        x = float(self.Q[query - self.first] @ self.K[key]) * self.scale
        return x if self.softcap is None else self.softcap * math.tanh(x / self.softcap)

    def shares(self, query: int, width: int) -> dict[int, float]:
        """Of the columns that the query at a position may see."""
        best: dict[int, float] = {}
        for key in range(query + 1):
            if self.window is None or query - key < self.window:
                best[key // width] = max(best.get(key // width, -math.inf), self.logit(query, key))
        logits: list[float] = [*best.values(), *([] if self.sink is None else [self.sink])]
        level = max(logits)
        total = sum(math.exp(m - level) for m in best.values())
        if self.sink is not None:
            total += math.exp(self.sink - level)
        return {column: math.exp(m - level) / total for column, m in best.items()}

    def rows(self, tile: int, p: Parameters) -> list[int]:
        """Positions of the rows looked at."""
        start, n = tile * p.block, 1
        if p.union == "group":
            n = max(2**i for i in range(8) if 2**i <= self.group and p.block % (p.every * 2**i) == 0)
        phase = (tile + self.number * (p.every if n > 1 else 1)) % (p.every * n)
        looked_at = range(start + phase, start + p.block, p.every * n)
        return [query for query in looked_at if self.first <= query < self.first + len(self.Q)]

    def large(self, tile: int, p: Parameters, strong: float = 0.0) -> set[int]:
        """Columns to which one of a query tile's rows gives a large enough share, and a strong one."""
        found: set[int] = set()
        for query in self.rows(tile, p):
            shares = self.shares(query, p.width or p.block)
            least = max(strong, min(p.eps, p.times / len(shares)))
            found |= {column for column, share in shares.items() if share >= least}
        return found


def columns_of(heads: Sequence[Head], p: Parameters, group: Sequence[Head] = ()) -> dict[int, set[int]]:
    """By query tile the columns that any of some heads keeps. group: all query heads of their KV head."""
    one, each = heads[0], p.block // (p.width or p.block)
    found: dict[int, set[int]] = {}
    for tile in range(one.first // p.block, (one.first + len(one.Q) - 1) // p.block + 1):
        if 0.0 in (p.eps, p.times):
            found[tile] = set(range((tile + 1) * each))
            continue
        found[tile] = set(range(tile * each, tile * each + each)) | (set(range(each)) if p.sink else set())
        for head in heads:
            found[tile] |= head.large(tile, p)
        for head in group if p.union == "head" and p.strong < 1.0 else ():
            found[tile] |= head.large(tile, p, p.strong)
    return found


def rowmax(heads: Sequence[Head], p: Parameters, group: Sequence[Head] = ()) -> Keep:
    """The pairs of each of some heads that share their choice: one alone, or those of a KV head. group: all of it."""
    chosen, window = columns_of(heads, p, group), heads[0].window

    def keep(query: int, key: int) -> bool:
        seen = window is None or query - key < window
        return seen and key // (p.width or p.block) in chosen[query // p.block]

    return keep
