"""Proxy and Delta in plain loops over Python's floats; shares no code with the correctors."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill import AttentionCall
from sparseprefill.testing import allowed_pairs

Entry = tuple[float, list[float]]
"""A logit, and the values that it weighs."""


@frozen(eq=False)
class Head:
    """One query head of one batch row: keys and values by their index among the call's keys."""

    call: AttentionCall
    batch: int
    head: int

    @property
    def start(self) -> int:
        """Index of the first real key."""
        return 0 if self.call.starts is None else int(self.call.starts[self.batch])

    def position(self, row: int) -> int:
        """Of a query row, counted from the first real key."""
        call = self.call
        return row + (call.kv_len - call.q.shape[2] if call.q_offset is None else call.q_offset) - self.start

    def key(self, index: int) -> list[float]:
        """A key."""
        found: list[float] = self.call.k[self.batch, self.head // self.call.group, index].double().tolist()
        return found

    def value(self, index: int) -> list[float]:
        """A value."""
        found: list[float] = self.call.v[self.batch, self.head // self.call.group, index].double().tolist()
        return found

    def logit(self, row: int, key: list[float]) -> float:
        """Of a query row with any key, softcap included."""
        call = self.call
        q = call.q[self.batch, self.head, row].double().tolist()
        scale = 1 / math.sqrt(len(q)) if call.scale is None else call.scale
        x = math.fsum(a * b for a, b in zip(q, key, strict=True)) * scale
        return x if call.softcap is None else call.softcap * math.tanh(x / call.softcap)

    def softmax(self, entries: list[Entry]) -> list[float]:
        """Their values, weighed; a sink takes its share."""
        width = self.call.value_dim
        if not entries:
            return [0.0] * width
        top = max(x for x, _ in entries)
        total = math.fsum(math.exp(x - top) for x, _ in entries)
        if self.call.sinks is not None:
            total += math.exp(float(self.call.sinks[self.head]) - top)
        return [math.fsum(math.exp(x - top) * value[d] for x, value in entries) / total for d in range(width)]

    def pairs(self, row: int, keys: list[int]) -> list[Entry]:
        """Keys as they are."""
        return [(self.logit(row, self.key(j)), self.value(j)) for j in keys]


def proxy(call: AttentionCall, keep: Tensor, tiles: Tensor, tile: int) -> Tensor:
    """Output. keep: bool ``[B, Hq, Nq, Nkv]``, the pairs computed; tiles: those of them that a mask's tiles hold."""
    allowed = allowed_pairs(call)
    out = torch.zeros(*call.q.shape[:3], call.value_dim, dtype=torch.float64)
    for b in range(call.q.shape[0]):
        for h in range(call.q.shape[1]):
            head = Head(call, b, h)
            for i in range(call.q.shape[2]):
                seen = allowed[b, i].nonzero()[:, 0].tolist()
                entries = head.pairs(i, [j for j in seen if bool(keep[b, h, i, j])])
                for first in range(head.start, call.kv_len, tile):
                    members = range(first, first + tile)
                    if not set(members) <= set(seen) or any(bool(tiles[b, h, i, j]) for j in members):
                        continue
                    left = [j for j in members if not bool(keep[b, h, i, j])]
                    if left:
                        entries.append(_mean(head, i, left))
                out[b, h, i] = torch.tensor(head.softmax(entries), dtype=torch.float64)
    return out


def _mean(head: Head, row: int, left: list[int]) -> Entry:
    keys, values = [head.key(j) for j in left], [head.value(j) for j in left]
    key, value = ([math.fsum(x) / len(left) for x in zip(*some, strict=True)] for some in (keys, values))
    return head.logit(row, key) + math.log(len(left)), value


def delta(call: AttentionCall, keep: Tensor, gamma: int) -> Tensor:
    """Output. keep: bool ``[B, Hq, Nq, Nkv]``, the pairs computed."""
    allowed = allowed_pairs(call)
    out = torch.zeros(*call.q.shape[:3], call.value_dim, dtype=torch.float64)
    for b in range(call.q.shape[0]):
        for h in range(call.q.shape[1]):
            head = Head(call, b, h)
            change = [0.0] * call.value_dim
            fresh = True
            for i in range(call.q.shape[2]):
                seen = allowed[b, i].nonzero()[:, 0].tolist()
                if not seen:
                    continue
                sparse = head.softmax(head.pairs(i, [j for j in seen if bool(keep[b, h, i, j])]))
                if fresh or head.position(i) % gamma == 0:
                    dense = head.softmax(head.pairs(i, seen))
                    change = [x - y for x, y in zip(dense, sparse, strict=True)]
                    fresh = False
                if all(bool(keep[b, h, i, j]) for j in seen):  # dense already
                    out[b, h, i] = torch.tensor(sparse, dtype=torch.float64)
                    continue
                out[b, h, i] = torch.tensor([x + y for x, y in zip(sparse, change, strict=True)], dtype=torch.float64)
    return out
