"""Phase 2: questions and answers see the keys of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sparseprefill.call import AttentionCall
from sparseprefill.errors import UnsupportedCallError

from .executor import AnchoredBlockExecutor, Shard
from .tail import Tail

TWICE = (
    "it runs a second time for one token, and its keys would be taken for the answer's: a logits processor, a stopping "
    "criterion, a streamer or a hook calls the model; let it call another one"
)


@define(eq=False)
class Answer:
    """The phase of everything behind the context. real: of each batch row's next tokens, how many are no padding.

    owner: whether this rank keeps the new tokens' keys; one does. ran: layers that have run in this step.
    """

    executor: AnchoredBlockExecutor
    shards: dict[int, Shard]
    owner: bool
    tails: dict[int, Tail] = field(factory=dict)
    real: dict[int, Sequence[int]] = field(factory=dict)
    ran: set[int] = field(factory=set)
    _last: tuple[object, Tensor | None] | None = None

    def expect(self, layers: Sequence[int], real: Sequence[int]) -> None:
        """The next forward's tokens: the `real[b]` last of row b count. After that all do, as decoding has it."""
        self.real = dict.fromkeys(layers, tuple(real))
        self.step()

    def step(self) -> None:
        """The next forward may come: each layer runs once in a step."""
        self.ran.clear()

    def attend(self, call: AttentionCall) -> Tensor:
        """Output of rows of the question or the answer, over the context's ranks and the tail."""
        if call.layer in self.ran:
            raise UnsupportedCallError([f"layer {call.layer}: {TWICE}"])
        self.ran.add(call.layer)
        real = self.real.pop(call.layer, None)
        if self.owner:
            tail = self.tails.setdefault(call.layer, Tail())
            count = call.q.shape[2]
            k, v = tail.append(call.k, call.v, (count,) * call.q.shape[0] if real is None else real)
            call = evolve(call, k=k, v=v, starts=self._starts(tail, call.q.device))
        return self.executor.attend(call, self.shards.get(call.layer), owner=self.owner, lse=False)[0]

    def _starts(self, tail: Tail, device: torch.device) -> Tensor | None:
        """Made once for all layers of a forward: they have the same."""
        key = (device, tail.counts, 0 if tail.k is None else tail.k.shape[2])
        if self._last is None or self._last[0] != key:
            self._last = key, tail.starts(device)
        return self._last[1]

    def keep(self, counts: Sequence[int]) -> None:
        """Drop all but the first `counts[b]` tokens of each row behind the context."""
        for tail in self.tails.values():
            tail.keep(counts)


class CountingLayer(CacheLayerMixin):
    """A layer as transformers knows it: how many tokens all ranks hold together, and no keys but the new ones."""

    is_sliding = False

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is kept here."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on: the phase keeps them."""
        self.length += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns of the batch that are computed, on all ranks together."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask would cover, and the first."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


def counting_cache(layers: Sequence[int], length: int) -> Cache:
    """A cache for `generate` on every rank. layers: indices that keep keys; those between them exist as well."""
    return Cache(layers=[CountingLayer(length) for _ in range(max(layers) + 1)])


def columns(rows: Sequence[Sequence[int]], done: Sequence[int], fill: int) -> tuple[Tensor, Tensor, int]:
    """Token ids and mask ``[B, P + Q]`` of unequal rows, and P: tokens that are done, then those to come.

    Both parts are aligned at their ends, so that P is one number for the batch and padding stands in front of each.
    rows: all tokens of each row. done: how many of them are computed.
    """
    past, ahead = max(done), max(len(row) - count for row, count in zip(rows, done, strict=True))
    ids = torch.full((len(rows), past + ahead), fill, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for number, (row, count) in enumerate(zip(rows, done, strict=True)):
        for part, end in ((row[:count], past), (row[count:], past + ahead)):
            ids[number, end - len(part) : end] = torch.tensor(part, dtype=torch.int64, device="cpu")
            mask[number, end - len(part) : end] = 1
    return ids, mask, past
