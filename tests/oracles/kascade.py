"""Kascade (arXiv 2512.16391), tile by tile and row by row: slow, float64, with plain loops.

Shares no code with the plugin. Settled where the paper and its code are silent, or differ:

- Tiles lie on the batch row's own grid: position 0 is its first real token. "Before the tile" is by position, so that
  the keys of earlier chunks count.
- k(n) = min(max(least, topk * n), n), rounded up to a multiple of `least`. n is the tile's first position. A tile that
  begins at or before k keeps every key.
- Scores are sums of softmax weights over a tile's rows and a KV head's query heads. A chunk that ends within a tile
  sums the rows that it has. Of equal scores the earlier key goes first.
- `sampled` rows: a tile is cut into so many stretches, of floor(i * tile / sampled) tokens from its first on; the last
  row of a stretch counts as often as the stretch has rows. With as many as the tile has, that is the rule itself.
- Sinks of a model are left out of the softmax whose weights are summed.
- Indices stand for one pass through the layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Chosen = dict[tuple[int, int, int], list[int] | None]
"""By batch row, KV head and tile: positions of the keys before it that are kept; None for all keys."""


@dataclass(frozen=True)
class Parameters:
    """As of the method."""

    topk: float
    least: int
    tile: int
    sampled: int | None = None
    dense_layers: int = 1

    def budget(self, n: int) -> int:
        """k(n)."""
        return math.ceil(min(max(float(self.least), self.topk * n), float(n)) / self.least) * self.least


@dataclass(frozen=True)
class Answer:
    """Of a layer: output, bool mask ``[B, Hq, Nq, Nkv]``, and the layer whose keys it took."""

    out: Tensor
    mask: Tensor
    of: int


@dataclass(frozen=True)
class BatchRow:
    """Where a batch row stands: its first key, its keys, and its query rows as (index, position)."""

    start: int
    length: int
    rows: list[tuple[int, int]]

    def tiles(self, tile: int) -> dict[int, list[tuple[int, int]]]:
        """Tile: its rows."""
        found: dict[int, list[tuple[int, int]]] = {}
        for index, position in self.rows:
            found.setdefault(position // tile, []).append((index, position))
        return found


def weights(q: Tensor, k: Tensor, softcap: float | None) -> Tensor:
    """Softmax of one row over the keys ``[n, D]``."""
    logits = (k @ q) / math.sqrt(q.shape[0])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.softmax(logits, 0)


def summed_rows(rows: list[tuple[int, int]], number: int, p: Parameters) -> list[tuple[int, int, int]]:
    """(index, position, how often it counts) of the rows of tile `number` that are summed."""
    count = p.tile if p.sampled is None else min(p.sampled, p.tile)
    found = []
    for i in range(count):
        first, behind = number * p.tile + i * p.tile // count, number * p.tile + (i + 1) * p.tile // count
        stretch = [row for row in rows if first <= row[1] < behind]
        if stretch:
            found.append((*stretch[-1], len(stretch)))
    return found


def choose(q: Tensor, k: Tensor, places: list[BatchRow], p: Parameters, softcap: float | None) -> Chosen:
    """What an anchor layer keeps."""
    group = q.shape[1] // k.shape[1]
    chosen: Chosen = {}
    for b, place in enumerate(places):
        for g in range(k.shape[1]):
            for number, rows in place.tiles(p.tile).items():
                begin = number * p.tile
                budget = p.budget(begin)
                if begin <= budget:
                    chosen[b, g, number] = None
                    continue
                sums = [0.0] * begin
                for index, position, times in summed_rows(rows, number, p):
                    for h in range(g * group, (g + 1) * group):
                        keys = k[b, g, place.start : place.start + position + 1]
                        row = weights(q[b, h, index], keys, softcap)
                        for j in range(begin):
                            sums[j] += times * float(row[j])
                best = sorted(range(begin), key=lambda j: -sums[j])[:budget]
                chosen[b, g, number] = sorted(best)
    return chosen


def run(
    q: Tensor, k: Tensor, v: Tensor, places: list[BatchRow], chosen: Chosen | None, heads: Sequence[int], tile: int,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the keys that KV head heads[g] has chosen and the tile's own; over all for None."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    mask = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    for b, place in enumerate(places):
        for h in range(q.shape[1]):
            for index, position in place.rows:
                number = position // tile
                columns = None if chosen is None else chosen[b, heads[h // group], number]
                before = list(range(number * tile)) if columns is None else columns
                keys = [place.start + j for j in [*before, *range(number * tile, position + 1)]]
                row = weights(q[b, h, index], k[b, h // group, keys], softcap)
                out[b, h, index] = row @ v[b, h // group, keys]
                mask[b, h, index, keys] = True
    return out, mask


def kascade(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]],
    anchors: Sequence[int],
    p: Parameters,
    maps: Mapping[int, Sequence[int]] | None = None,
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    softcap: float | None = None,
) -> list[Answer]:
    """All layers of one call, in order; the first is an anchor."""
    q, k, _ = layers[0]
    offset = k.shape[2] - q.shape[2] if q_offset is None else q_offset
    places = []
    for b in range(q.shape[0]):
        start = 0 if starts is None else starts[b]
        length = k.shape[2] - start if lengths is None else lengths[b]
        rows = [(i, offset + i - start) for i in range(q.shape[2]) if 0 <= offset + i - start < length]
        places.append(BatchRow(start, length, rows))
    answers = []
    chosen: Chosen = {}
    of = 0
    for layer, (q, k, v) in enumerate(layers):
        heads: Sequence[int] = range(k.shape[1])
        if layer in anchors:
            chosen, of = choose(q, k, places, p, softcap), layer
        else:
            heads = (maps or {}).get(layer, heads)
        dense = layer < p.dense_layers
        answers.append(Answer(*run(q, k, v, places, None if dense else chosen, heads, p.tile, softcap), of))
    return answers
