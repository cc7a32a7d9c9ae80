"""How well the keys of one layer serve another, and the layers that serve all best."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from .capture import LayerSums


@frozen(eq=False)
class TopKeys:
    """The keys that a layer would keep: index ``[Hkv, T, k]``, and what they hold of its own sums, ``[Hkv, T]``."""

    index: Tensor
    held: Tensor

    @classmethod
    def of(cls, sums: LayerSums, columns: int) -> TopKeys:
        """The `columns` keys of the largest sums of each tile."""
        top = sums.before.topk(min(columns, sums.before.shape[-1]), dim=-1)
        return cls(top.indices, top.values.sum(-1))


def similarity(one: TopKeys, other: LayerSums, own: TopKeys) -> Tensor:
    """``[H', H]``: of what its own keys would hold for KV head h' of `other`, how much those of head h of `one` hold.

    S of the authors' code: what lies inside the tile counts on both sides, and the tile that fares worst counts.
    """
    heads, tiles, count = one.index.shape
    each = []
    for h in range(heads):
        index = one.index[h].expand(other.before.shape[0], tiles, count)
        held = torch.gather(other.before, 2, index).sum(-1)  # [H', T]
        each.append(((held + other.inside) / (own.held + other.inside)).amin(-1))
    return torch.stack(each, 1)


def best(gain: Tensor, count: int) -> tuple[tuple[int, ...], float]:
    """Indices of the `count` rows, the first among them, that serve all best, and how well; by dynamic programming.

    gain: ``[n, n]``, entry (a, b) what b has from a; of columns before a row nothing is read. A row serves itself and
    those up to the next: ``V[k][i] = max over l < i of V[k - 1][l] + sum of gain[l, l:i]``.
    """
    n = gain.shape[0]
    table = gain.double().triu()
    served = torch.cat([table.new_zeros(n, 1), table.cumsum(1)], 1)  # [l, i]: of l, what it gives up to i
    value = torch.full((count + 1, n + 1), -torch.inf, dtype=torch.float64)
    value[0, 0] = 0.0
    came = torch.zeros(count + 1, n + 1, dtype=torch.int64)
    for k in range(1, count + 1):
        for i in range(k, n + 1):
            options = value[k - 1, :i] + served[:i, i]
            came[k, i] = options.argmax()
            value[k, i] = options.max()
    chosen: list[int] = []
    i = n
    for k in range(count, 0, -1):
        i = int(came[k, i])
        chosen.append(i)
    return tuple(reversed(chosen)), float(value[count, n])


def mapped(similar: Tensor) -> tuple[int, ...]:
    """Of each head h' the head h of the other layer that serves it best; of equal ones its own number, else the first.

    similar: ``[H', H]``.
    """
    own = similar.diagonal()
    most = similar.max(1)
    return tuple(torch.where(own >= most.values, torch.arange(len(similar)), most.indices).tolist())


def ordered(layers: Sequence[int], similar: dict[tuple[int, int], Tensor], weight: dict[int, float]) -> Tensor:
    """``[n, n]``: what layer b has from layer a: its weight times the mean over its heads of the best head's share."""
    gain = torch.zeros(len(layers), len(layers), dtype=torch.float64)
    for i, a in enumerate(layers):
        for j, b in enumerate(layers[i:], i):
            gain[i, j] = weight[b] * float(similar[a, b].amax(1).mean())
    return gain
