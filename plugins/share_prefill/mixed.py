"""One plan of two: heads that share or make a pivot compute its tiles, all others what an inner plan says."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.mask.geometry import diagonal_map
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import Priority
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.plan import Carry, Plan, SoftmaxState


def mixed(call: AttentionCall, inner: Plan, tiles: Tensor, block: int, chosen: Tensor, priority: Priority) -> Plan:
    """The tiles, bool ``[B, H, R, C]``, and their diagonal ones for the heads `chosen`, bool ``[B, H]``.

    Other heads have what `inner` selects, pair for pair, and nothing else. Where it lies on tiles of another size than
    `block`, the mask has the largest tiles that divide both. priority: of the heads `chosen`.
    """
    own = (tiles | diagonal_map(call.geometry, block, block)[:, None]) & chosen[..., None, None]
    mask = mask_of_heads(inner.mask, ~chosen) | SparseMask.from_tiles(call, own, block, diagonal=False)
    # A head has either tiles of its own, or tiles and stripes of `inner`.
    mask = evolve(mask, disjoint=inner.mask.disjoint)
    carry = None if inner.carry is None else carry_of_heads(inner.carry, ~chosen)
    worth = HeadsPriority(chosen, priority, inner.priority)
    return Plan(mask, carry, probe=inner.probe, priority=worth, notes=inner.notes)


def mask_of_heads(mask: SparseMask, heads: Tensor) -> SparseMask:
    """The part of a mask that belongs to some heads, bool ``[B, H]``; nothing for the others. No value is read on the
    host."""
    tiles, stripes = None, mask.stripes
    if mask.has_tiles:
        keep = mask.tile_map() & heads[..., None, None]
        tiles = TileMap(geometry=mask.geometry, tile_q=mask.tile_q, tile_k=mask.tile_k, keep=keep)
    if stripes is not None:
        stripes = evolve(stripes, counts=stripes.counts.masked_fill(~heads[..., None], 0), same_heads=False)
    return evolve(mask, tiles=tiles, stripes=stripes)


def carry_of_heads(carry: Carry, heads: Tensor) -> Carry:
    """The part of a carry that belongs to some heads, bool ``[B, H]``; the others begin with nothing."""
    state, rows = carry.state, ~heads[..., None]
    left = SoftmaxState(
        state.m.masked_fill(rows, -torch.inf),
        state.l.masked_fill(rows, 0.0),
        state.acc.masked_fill(rows[..., None], 0.0),
    )
    return Carry(left, mask_of_heads(carry.region, heads))


@frozen(eq=False)
class HeadsPriority(Priority):
    """One priority's scores for the heads `chosen`, bool ``[B, H]``; for the rest those of `other`, NaN for None."""

    chosen: Tensor
    own: Priority
    other: Priority | None

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        own = self.own.tile_scores(call, tile_q, tile_k)
        other = torch.nan if self.other is None else self.other.tile_scores(call, tile_q, tile_k)
        return torch.where(self.chosen[..., None, None], own, other)

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        own = self.own.column_scores(call, position, heads)
        other = torch.nan if self.other is None else self.other.column_scores(call, position, heads)
        return torch.where(self.chosen[:, heads, None, None], own, other)
