"""The anchor's keys and values on their way from rank 0, which computes them, to the others: layer by layer."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from .ranks import Ranks


@frozen
class Keys:
    """Sizes of a layer's keys and values: KV heads, head dimensions, type and place."""

    heads: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


@define(eq=False)
class Anchor:
    """Keys of one batch row's anchor: `length` tokens of every layer, in the order in which the layers run.

    Rank 0 calls `send` once a layer, the others `take`. Rank 0 does not wait, so that it computes on while a layer's
    keys travel; the others ask for a layer's keys before they compute the layer before it.
    """

    ranks: Ranks
    layers: dict[int, Keys]
    length: int
    under_way: deque[tuple[int, Any, Tensor]] = field(factory=deque)
    here: dict[int, tuple[Tensor, Tensor]] = field(factory=dict)
    asked: int = 0

    def send(self, k: Tensor, v: Tensor) -> None:
        """Start sending a layer's k ``[1, Hkv, length, D]`` and v."""
        while self.under_way and self.under_way[0][1].is_completed():
            self.under_way.popleft()
        flat = torch.cat([k.reshape(-1), v.reshape(-1)]).view(torch.uint8)
        self.under_way.append((self.asked, self.ranks.broadcast(flat), flat))
        self.asked += 1

    def take(self, layer: int, *, keep: bool) -> tuple[Tensor, Tensor]:
        """A layer's keys and values. keep: another block of this rank will ask again."""
        order = list(self.layers)
        while layer not in self.here:
            while self.asked < min(order.index(layer) + 2, len(order)):
                self._ask(order[self.asked])
            number, work, flat = self.under_way.popleft()
            self.ranks.wait(work, flat)
            self.here[number] = self._split(self.layers[number], flat)
        return self.here[layer] if keep else self.here.pop(layer)

    def finish(self) -> None:
        """Take part in what is left: every rank does, with blocks or without."""
        if self.ranks.rank:
            order = list(self.layers)
            while self.asked < len(order):
                self._ask(order[self.asked])
                self._drain()
        self._drain()

    def _drain(self) -> None:
        while self.under_way:
            _, work, flat = self.under_way.popleft()
            self.ranks.wait(work, flat)

    def _ask(self, layer: int) -> None:
        keys = self.layers[layer]
        count = self.length * keys.heads * (keys.width + keys.value_width)
        flat = torch.empty(count, dtype=keys.dtype, device=keys.device).view(torch.uint8)
        self.under_way.append((layer, self.ranks.broadcast(flat), flat))
        self.asked += 1

    def _split(self, keys: Keys, flat: Tensor) -> tuple[Tensor, Tensor]:
        k, v = flat.view(keys.dtype).split([self.length * keys.heads * x for x in (keys.width, keys.value_width)])
        return k.view(1, keys.heads, self.length, -1), v.view(1, keys.heads, self.length, -1)
