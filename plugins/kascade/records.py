"""A request's memory of an anchor layer: the keys that it chose, by part of the call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.mask.geometry import kept
from sparseprefill.mask.lists import IndexLists

Place = tuple[int, ...]
"""Batch rows, query rows and keys of a call, and where its queries begin: the next chunk or part by rows has others."""


@frozen(eq=False)
class Chosen:
    """The estimator's work in a layer; in `Plan.notes` under the key of its stage.

    layer: whose keys the plan has, the call's own or its anchor's; None for all keys. lists: the layer's choice, lists
    ``[B, Hkv, G]``, where later layers take it; else None. note: why a layer that follows an anchor chose for itself,
    or why some heads of it follow others than the table says; empty else.
    """

    layer: int | None
    lists: IndexLists | None = None
    note: str = ""


@frozen(eq=False)
class Selection:
    """The lists of neighbouring KV heads of a layer, ``[B, H, G]``; first: index of the first head in the layer."""

    first: int
    lists: IndexLists

    @property
    def behind(self) -> int:
        """Index of the head behind the last."""
        return self.first + self.lists.shape[1]

    def joined(self, more: Selection) -> Selection:
        """With the heads behind, which another part of the layer has chosen; those alone where they do not follow."""
        if more.first != self.behind:
            return more
        return evolve(self, lists=IndexLists.joined((self.lists, more.lists), 1))

    def of_heads(self, wanted: tuple[int, ...], own: int) -> tuple[IndexLists, tuple[int, ...]]:
        """The lists of KV heads, by their index in the layer, and which of these are not here.

        In their place stands the list of the head with the taker's own index, `own` being that of the first taker.
        """
        missing = tuple(head for head in wanted if not self.first <= head < self.behind)
        taken = tuple(own + i if head in missing else head for i, head in enumerate(wanted))
        if taken == tuple(range(self.first, self.behind)):
            return self.lists, missing
        index = _index(tuple(head - self.first for head in taken), self.lists.counts.device)
        counts, offsets = self.lists.counts[:, index], self.lists.offsets[:, index]
        return IndexLists(counts, offsets, self.lists.indices, sound=self.lists.sound), missing


@frozen(eq=False)
class Kept:
    """The choice of the last anchor layer, by part of the call. at: the layer that was observed last."""

    layer: int
    at: int
    found: Mapping[Place, Selection]

    def selection(self, call: AttentionCall, anchor: int) -> Selection | None:
        """The anchor's choice for this part of the call, in this very pass through the layers; None if nothing."""
        if self.layer != anchor or not self.layer < call.layer or call.layer < self.at:
            return None
        found, first = self.found.get(place_of(call)), call.first_head // call.group
        there = found is not None and found.first <= first and first + call.kv_heads <= found.behind
        return found if there else None


def renewed(call: AttentionCall, old: Kept | None, chosen: Chosen) -> Kept | None:
    """`old`, or None, after a layer. An anchor's parts come one after the other; what was there before them goes."""
    if chosen.lists is None:
        return None if old is None else evolve(old, at=call.layer)
    mine = Selection(call.first_head // call.group, chosen.lists)
    place = place_of(call)
    if old is None or (old.layer, old.at) != (call.layer, call.layer):
        return Kept(call.layer, call.layer, {place: mine})
    before = old.found.get(place)
    return evolve(old, found={**old.found, place: mine if before is None else before.joined(mine)})


def place_of(call: AttentionCall) -> Place:
    """The part of its layers that a call is, heads apart."""
    g = call.geometry
    return g.batch, g.q_len, g.kv_len, g.q_offset


@kept
def _index(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
