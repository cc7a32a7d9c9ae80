"""XAttention, Algorithm 1 of the paper, antidiagonal by antidiagonal: slow, float64, one head at a time.

Shares no code with the plugin, and does not use the paper's reshaping: it walks the pairs. Settled where the paper is
silent:

- Blocks, and groups of `stride` tokens inside them, lie on the batch row's own grid.
- The score of (query group i, key group j) is the mean logit over the pairs (a, S - 1 - a) that exist and are causal.
  For two whole groups, j < i, this is the paper's sum / S.
- Of the groups on the diagonal only the causal pairs count; without any, the group is left out.
- Under a sliding window a key group counts where one of its keys lies in the window of one of the group's rows.
- A softcap is applied to the mean.
- A query block's score of a key block is the sum over its query groups' softmax rows. The smallest set of blocks that
  reaches `threshold` of the row's total is kept, the crossing one included; threshold = 1 keeps everything.
- The block's own is kept always, the first key block where `sink` is set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracles.classic import Keep


@dataclass(frozen=True)
class Parameters:
    """The options of the paper."""

    stride: int
    threshold: float
    block: int
    sink: bool = True


@dataclass(frozen=True)
class Head:
    """One head of one batch row, without its padding: Q stands at positions first, first + 1, ..."""

    Q: Tensor
    K: Tensor
    first: int
    scale: float
    softcap: float | None
    window: int | None

    def antidiagonal(self, i: int, j: int, stride: int) -> float:
        """Mean logit of the causal pairs on the antidiagonal of groups i and j; -inf if there are none."""
        logits = []
        for a in range(stride):
            query, key = i * stride + a, j * stride + stride - 1 - a
            if self.first <= query < self.first + len(self.Q) and key <= query:
                logits.append(float(self.Q[query - self.first] @ self.K[key]) * self.scale)
        if not logits or (self.window is not None and i > j and (i - j) * stride - stride + 1 >= self.window):
            return -math.inf
        mean = sum(logits) / len(logits)
        return mean if self.softcap is None else self.softcap * math.tanh(mean / self.softcap)


def find_blocks(scores: list[float], threshold: float) -> set[int]:
    """The fewest blocks whose scores sum to `threshold` of all or more."""
    if threshold == 1.0:
        return set(range(len(scores)))
    chosen: set[int] = set()
    taken = 0.0
    for c in sorted(range(len(scores)), key=lambda c: -scores[c]):
        if taken >= threshold * sum(scores):
            break
        chosen.add(c)
        taken += scores[c]
    return chosen


def algorithm_1(head: Head, p: Parameters) -> Keep:
    """The pairs of one head."""
    end = head.first + len(head.Q)
    per_block = p.block // p.stride
    chosen: dict[int, set[int]] = {}
    for b in range(head.first // p.block, (end - 1) // p.block + 1):
        scores = [0.0] * (b + 1)
        for i in range(b * per_block, (b + 1) * per_block):
            logits = [head.antidiagonal(i, j, p.stride) for j in range(i + 1)]
            if max(logits) == -math.inf:
                continue
            for j, mass in enumerate(torch.softmax(torch.tensor(logits, dtype=torch.float64), -1).tolist()):
                scores[j // per_block] += mass
        chosen[b] = find_blocks(scores, p.threshold) | {b} | ({0} if p.sink else set())

    def keep(query: int, key: int) -> bool:
        seen = head.window is None or query - key < head.window
        return seen and key // p.block in chosen[query // p.block]

    return keep
