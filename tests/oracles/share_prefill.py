"""SharePrefill, Algorithms 1-5 of the paper, line by line: slow, float64, one head at a time.

Shares no code with the plugin; Algorithm 5 and the dense rows are those of `oracles.classic`. Line numbers ("A3.6":
Algorithm 3, line 6) are the paper's. Settled where the paper is silent or leaves a choice:

- Positions lie on the batch row's own grid: blocks count from its first real token.
- The last query block (A3.2) is the last `block` real queries of the call. A pivot's representative (A2) is the same
  average for the pivot's head.
- Scores of a block are the exact attention mass, averaged over the rows; the paper takes the softmax over blocks of the
  mean logit.
- JSD has base 2, and 0 log 0 = 0. The uniform distribution spreads over the blocks that hold a causal key.
- Heads of one layer are decided at once, before any of them has run: the first head in order that may make a cluster's
  pivot does, the others of its cluster in this layer take vertical-slash.
- No pivot is made that no later layer could use, and none at tau = 0 ("w/o sharing", Table 2).
- A2's covering set is per row of blocks; as printed it is of the map as a whole.
- Pivots belong to one call of each layer: a later chunk begins with none.
- The diagonal block is kept always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracles.classic import Keep, chosen, dense_rows, vertical_slash

Clusters = Mapping[tuple[int, int], int]
"""(layer, head) -> cluster; a head without an entry is noise."""


@dataclass(frozen=True)
class Parameters:
    """The options of the method."""

    gamma: float
    tau: float
    delta: float
    block: int


@dataclass(frozen=True)
class Head:
    """One head of one batch row, without its padding: Q stands at positions first, first + 1, ..."""

    Q: Tensor
    K: Tensor
    first: int
    scale: float
    softcap: float | None

    @property
    def end(self) -> int:
        return self.first + len(self.Q)

    def qk(self, position: int) -> Tensor:
        """Logits of one row over its causal keys, before any softcap."""
        return self.K[: position + 1] @ self.Q[position - self.first] * self.scale

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def scores(self, rows: range, p: Parameters) -> list[float]:
        """Block-averaged attention of some rows: one number for each block of keys up to the last row."""
        blocks = (rows.stop - 1) // p.block + 1
        total = [0.0] * blocks
        for position in rows:
            for key, value in enumerate(torch.softmax(self.capped(self.qk(position)), -1).tolist()):
                total[key // p.block] += value
        return [value / len(rows) for value in total]


@dataclass(frozen=True)
class Pivot:
    """Representative a~ and pattern M: the kept (query block, key block) pairs."""

    a: list[float]
    M: set[tuple[int, int]]


def js_distance(p: list[float], q: list[float]) -> float:
    """sqrt(JSD(p || q)), base 2."""
    divergence = 0.0
    for one, other in ((p, q), (q, p)):
        for x, y in zip(one, other, strict=True):
            if x > 0:
                divergence += 0.5 * x * math.log2(x / (0.5 * (x + y)))
    return math.sqrt(max(divergence, 0.0))


def budget(scores: list[float], gamma: float) -> set[int]:
    """Algorithm 2: the k largest scores, k the smallest that reaches gamma; gamma = 1 keeps all."""
    if gamma == 1.0:
        return set(range(len(scores)))
    taken: set[int] = set()
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if sum(scores[j] for j in taken) >= gamma * sum(scores):
            break
        taken.add(i)
    return taken


def pivot_pattern(head: Head, p: Parameters) -> set[tuple[int, int]]:
    """Algorithm 2: the block map of a head that was computed in full, and its covering set."""
    size = p.block
    rows = {
        r: head.scores(range(max(r * size, head.first), min((r + 1) * size, head.end)), p)
        for r in range(head.first // size, (head.end - 1) // size + 1)
    }
    return {(r, c) for r, row in rows.items() for c in budget(row, p.gamma)}


def decide(
    a_hats: list[list[float]], layer: int, clusters: Clusters, pivots: Mapping[int, Pivot], p: Parameters
) -> list[str]:
    """Algorithms 3 and 4 for the heads of one layer: "shared", "dense" or "vertical_slash"."""
    patterns: list[str] = []
    waiting: set[int] = set()
    for h, a_hat in enumerate(a_hats):
        c = clusters.get((layer, h))
        uniform = [1.0 / len(a_hat)] * len(a_hat)
        pattern = "vertical_slash"
        if c is not None and js_distance(a_hat, uniform) < p.delta:  # A3.6, A3.7
            if c in pivots:
                if js_distance(a_hat, pivots[c].a) < p.tau:
                    pattern = "shared"
            elif c not in waiting and p.tau > 0 and any(k == c and at[0] > layer for at, k in clusters.items()):
                pattern = "dense"  # A4: M <- ones
                waiting.add(c)
        patterns.append(pattern)
    return patterns


Rest = Callable[[int, Head], Keep]
"""What a head keeps that neither shares nor makes a pivot, by its number."""


def one_layer(
    heads: list[Head], layer: int, clusters: Clusters, pivots: dict[int, Pivot], p: Parameters, rest: Rest
) -> tuple[list[Keep], list[str]]:
    """Algorithm 1: a layer's patterns; writes the pivots that it makes, after all heads have run.

    rest: what a head keeps, by its number, that neither shares nor makes a pivot.
    """
    last = range(max(heads[0].first, heads[0].end - p.block), heads[0].end)
    a_hats = [head.scores(last, p) for head in heads]  # A3.3
    patterns = decide(a_hats, layer, clusters, pivots, p)
    given = [pivots.get(clusters.get((layer, h), -1)) for h in range(len(heads))]
    keeps = [
        rest(h, heads[h]) if pattern == "vertical_slash" else _keep(pattern, given[h], p)
        for h, pattern in enumerate(patterns)
    ]
    for h, pattern in enumerate(patterns):
        if pattern == "dense":  # A1.9
            pivots[clusters[layer, h]] = Pivot(a_hats[h], pivot_pattern(heads[h], p))
    return keeps, patterns


def _keep(pattern: str, pivot: Pivot | None, p: Parameters) -> Keep:
    if pattern == "dense":
        return lambda query, key: True
    assert pivot is not None
    M, size = pivot.M, p.block
    return lambda query, key: query // size == key // size or (query // size, key // size) in M


@dataclass(frozen=True)
class Answer:
    """Of one layer: out ``[B, Hq, Nq, Dv]``, mask bool ``[B, Hq, Nq, Nkv]``, patterns by batch row and head."""

    out: Tensor
    mask: Tensor
    patterns: list[list[str]]


def share_prefill(
    layers: list[tuple[Tensor, Tensor, Tensor]],
    clusters: Clusters,
    p: Parameters,
    *,
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    softcap: float | None = None,
) -> list[Answer]:
    """All layers of one call, in order; every batch row has pivots of its own."""

    def rest(layer: int, b: int, real: list[int], keys: slice) -> Rest:
        return lambda h, head: vertical_slash(head.Q, head.K, head.first, p.gamma, p.block, head.scale, head.softcap)

    return all_layers(layers, clusters, p, rest, q_offset=q_offset, starts=starts, lengths=lengths, softcap=softcap)


def all_layers(
    layers: list[tuple[Tensor, Tensor, Tensor]],
    clusters: Clusters,
    p: Parameters,
    rest: Callable[[int, int, list[int], slice], Rest],
    *,
    q_offset: int | None,
    starts: list[int] | None,
    lengths: list[int] | None,
    softcap: float | None,
) -> list[Answer]:
    """The same with other masks for the rest: of a layer and batch row, with its real query rows and its keys."""
    batch = layers[0][0].shape[0]
    pivots: list[dict[int, Pivot]] = [{} for _ in range(batch)]
    answers = []
    for layer, (q, k, v) in enumerate(layers):
        heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
        offset = kv_len - q_len if q_offset is None else q_offset
        scale = 1.0 / math.sqrt(q.shape[-1])
        out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
        mask = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
        patterns: list[list[str]] = []
        for b in range(batch):
            start = 0 if starts is None else starts[b]
            length = kv_len - start if lengths is None else lengths[b]
            real = [i for i in range(q_len) if 0 <= offset + i - start < length]
            if not real:
                patterns.append([])
                continue
            first, keys = offset + real[0] - start, slice(start, start + length)
            own = [Head(q[b, h, real], k[b, h * k.shape[1] // heads, keys], first, scale, softcap)
                   for h in range(heads)]  # fmt: skip
            keeps, found = one_layer(own, layer, clusters, pivots[b], p, rest(layer, b, real, keys))
            patterns.append(found)
            for h, keep in enumerate(keeps):
                values = v[b, h * k.shape[1] // heads, keys]
                out[b, h, real] = dense_rows(own[h].Q, own[h].K, values, first, scale, softcap, keep)
                for n, i in enumerate(real):
                    mask[b, h, i, [key + start for key in chosen(first + n, length, keep)]] = True
        answers.append(Answer(out, mask, patterns))
    return answers
