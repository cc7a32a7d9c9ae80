"""FlexPrefill, Algorithms 1-4 of the paper, line by line: slow, float64, one head at a time.

Shares no code with the plugin. "A2.3" is Algorithm 2, line 3, in the order in which the paper states its steps.
Settled where the paper is silent:

- Blocks lie on the batch row's own grid. The representative queries are the last `block` real ones of the call.
- A block's mean key is over its keys up to the call's last query. A block is scored where causality and the window
  allow any pair of it.
- Both distributions of the test sum to 1: the true one is the attention mass of a block.
- Jensen-Shannon divergence by the natural logarithm, as the authors' release has it, and 0 log 0 = 0.
- The element that crosses gamma is kept; of equal scores the earlier one; gamma = 1 keeps everything.
- Budgets are in whole blocks: per query block of a query-aware head, and for columns and diagonals each of others.
- Columns are single keys. The pairs of slash bin s, distances [s * block, (s + 1) * block), fall in the diagonals
  s and s + 1 of blocks, and both are kept.
- The first block and the block's own are kept always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracles.classic import Keep


@dataclass(frozen=True)
class Parameters:
    """The options of the paper, budgets in tokens."""

    gamma: float
    tau: float
    block: int
    min_budget: int = 0
    max_budget: int | None = None
    coverage: str = "row"

    def blocks(self) -> tuple[int, int | None]:
        """Least and most blocks."""
        least = math.ceil(self.min_budget / self.block)
        return least, None if self.max_budget is None else math.ceil(self.max_budget / self.block)


@dataclass(frozen=True)
class Head:
    """One head of one batch row, without its padding: Q stands at positions first, first + 1, ..."""

    Q: Tensor
    K: Tensor
    first: int
    scale: float
    softcap: float | None
    window: int | None

    @property
    def end(self) -> int:
        return self.first + len(self.Q)

    def logits(self, query: Tensor, keys: Tensor) -> Tensor:
        qk = keys @ query * self.scale
        return qk if self.softcap is None else self.softcap * torch.tanh(qk / self.softcap)

    def visible(self, query: int, key: int) -> bool:
        return key <= query and (self.window is None or query - key < self.window)

    def mean_key(self, block: int, size: int) -> Tensor:
        return self.K[block * size : min((block + 1) * size, self.end)].mean(0)

    def rows(self, block: int, size: int) -> Tensor:
        """Queries of a query block that the call holds."""
        inside = [n for n in range(len(self.Q)) if (self.first + n) // size == block]
        return self.Q[inside]


def jensen_shannon(p: list[float], q: list[float]) -> float:
    """The distance: square root of the divergence in nats, between 0 and sqrt(ln 2)."""
    total = 0.0
    for x, y in zip(p, q, strict=True):
        m = (x + y) / 2
        total += x / 2 * math.log(x / m) if x > 0 else 0.0
        total += y / 2 * math.log(y / m) if y > 0 else 0.0
    return math.sqrt(max(total, 0.0))


def cover(scores: list[float], gamma: float, least: int, most: int | None) -> list[int]:
    """K = min {k : the k largest scores sum to gamma of all or more}, within the budgets; I[1:K]."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    k, taken = 0, 0.0
    while k < len(order) and (gamma == 1.0 or taken < gamma * sum(scores)):
        taken += scores[order[k]]
        k += 1
    k = max(k, least)
    return order[: k if most is None else min(k, most)]


def last_block_attention(head: Head, size: int) -> list[tuple[int, list[float]]]:
    """Position and exact attention, over the keys up to the call's end, of every representative query."""
    sample = []
    for n in range(max(0, len(head.Q) - size), len(head.Q)):
        position = head.first + n
        qk = head.logits(head.Q[n], head.K[: head.end])
        hidden = torch.tensor([not head.visible(position, key) for key in range(head.end)])
        sample.append((position, torch.softmax(qk.masked_fill(hidden, -math.inf), -1).tolist()))
    return sample


def algorithm_2(head: Head, p: Parameters) -> bool:
    """Sparse pattern search: whether the head is query-aware."""
    size, blocks = p.block, math.ceil(head.end / p.block)
    sample = last_block_attention(head, size)  # A2.1
    true = [0.0] * blocks
    for _, attention in sample:  # A2.3: the pooled true attention
        for key, mass in enumerate(attention):
            true[key // size] += mass / len(sample)
    query = head.Q[-len(sample) :].mean(0)
    logits = []
    for c in range(blocks):  # A2.2: the attention of the pooled vectors
        keys = range(c * size, min((c + 1) * size, head.end))
        seen = any(head.visible(position, key) for position, _ in sample for key in keys)
        logits.append(float(head.logits(query, head.mean_key(c, size)[None])[0]) if seen else -math.inf)
    estimate = torch.softmax(torch.tensor(logits, dtype=torch.float64), -1).tolist()
    return jensen_shannon(estimate, true) < p.tau  # A2.4-5


def algorithm_3(head: Head, p: Parameters) -> Keep:
    """Vertical-slash index search."""
    size, (least, most) = p.block, p.blocks()
    a_v = [0.0] * len(head.K)
    a_s = [0.0] * math.ceil(len(head.K) / size)
    for position, attention in last_block_attention(head, size):
        for key, mass in enumerate(attention[: position + 1]):
            a_v[key] += mass
            a_s[(position - key) // size] += mass
    columns = set(cover(a_v, p.gamma, least * size, None if most is None else most * size))
    slashes = set(cover(a_s, p.gamma, least, most))

    def keep(query: int, key: int) -> bool:
        lag = query // size - key // size
        return key in columns or lag in slashes or lag - 1 in slashes

    return keep


def algorithm_4(head: Head, p: Parameters) -> Keep:
    """Query-aware index search over the map of blocks; per row by default, flattened with coverage "global"."""
    size, (least, most) = p.block, p.blocks()
    scores: dict[int, list[float]] = {}
    for r in range(head.first // size, (head.end - 1) // size + 1):
        query, logits = head.rows(r, size).mean(0), []
        for c in range(r + 1):
            pairs = ((i, j) for i in range(r * size, (r + 1) * size) for j in range(c * size, (c + 1) * size))
            seen = any(head.visible(i, j) for i, j in pairs)
            logits.append(float(head.logits(query, head.mean_key(c, size)[None])[0]) if seen else -math.inf)
        scores[r] = torch.softmax(torch.tensor(logits, dtype=torch.float64), -1).tolist()
    if p.coverage == "row":
        chosen = {(r, c) for r, row in scores.items() for c in cover(row, p.gamma, least, most)}
    else:
        cells = [(r, c) for r, row in scores.items() for c in range(len(row))]
        flat = [scores[r][c] for r, c in cells]
        chosen = {cells[n] for n in cover(flat, p.gamma, 0, None)}
        for r, row in scores.items():
            chosen |= {(r, c) for c in cover(row, 0.0, least, most)}
            if most is not None:
                chosen -= {(r, c) for c in set(range(len(row))) - set(cover(row, 1.0, 0, most))}
    return lambda query, key: (query // size, key // size) in chosen


def algorithm_1(head: Head, p: Parameters) -> Keep:
    """The pairs of one head."""
    keep = algorithm_4(head, p) if algorithm_2(head, p) else algorithm_3(head, p)

    def kept(query: int, key: int) -> bool:
        forced = key // p.block in (0, query // p.block)
        return head.visible(query, key) and (forced or keep(query, key))

    return kept
