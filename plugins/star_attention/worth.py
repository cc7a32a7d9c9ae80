"""What Star Attention leaves as priority: nearness to the row and to the anchor, or the inner method's scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask.priority import Priority, PriorityScores, nearness

from .blocks import Blocks
from .scatter import Places

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

    from .sizes import Rule


@frozen(eq=False)
class StarPriority(Priority):
    """The anchor stands for sinks and counts from its first tile, the block from the query's own tile.

    inner: the inner method's priority, in the call of the blocks. It speaks for rows of phase 1 and the keys of anchor
    and block; elsewhere nearness does.
    """

    rule: Rule
    inner: Priority | None = None

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        near = self._near().tile_scores(call, tile_q, tile_k)
        if self.inner is None:
            return near
        places = self._places(call)
        inner = self.inner.tile_scores(places.blocks.call, tile_q, tile_k)
        position = call.geometry.tiles(tile_q) * tile_q
        mine, source, inside = places.find(position)
        row = torch.div(inside, tile_q, rounding_mode="floor") - places.blocks.call.geometry.first_tile(tile_q)[source]
        moved = inner[source, :, row.clamp(0, inner.shape[2] - 1)].transpose(1, 2)
        return self._moved(moved, near, places, mine, source, tile_k)

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        near = self._near().column_scores(call, position, heads)
        if self.inner is None:
            return near
        places = self._places(call)
        mine, source, inside = places.find(position)
        # Each row of the blocks' call is asked for all places that any group has in it, one group at a time.
        asked = torch.zeros(places.blocks.call.q.shape[0], dtype=torch.int64, device=position.device)
        found = []
        for i in range(position.shape[1]):
            here = asked.scatter(0, source[:, i], inside[:, i])[:, None]
            found.append(self.inner.column_scores(places.blocks.call, here, heads)[source[:, i]])
        return self._moved(torch.cat(found, 2), near, places, mine, source, 1)

    def _near(self) -> PriorityScores:
        tile = self.rule.tile
        return PriorityScores(tiles=self._nearness, tile_q=tile, tile_k=tile)

    def _nearness(self, call: AttentionCall) -> Tensor:
        return nearness(call, self.rule.sizes(call.geometry).anchor, self.rule.tile)

    def _places(self, call: AttentionCall) -> Places:
        sizes = self.rule.sizes(call.geometry)
        return Places.of(call.geometry, Blocks.of(call, sizes, self.rule.tile), sizes, self.rule.tile)

    def _moved(self, scores: Tensor, near: Tensor, places: Places, mine: Tensor, source: Tensor, tile_k: int) -> Tensor:
        """``[B, h, n, X]``: scores ``[B, h, n, Y]`` by key tiles of the blocks' call, by those of the call."""
        blocks = places.blocks
        column = torch.arange(near.shape[-1], device=near.device) * tile_k
        prefix, start = (x.flatten()[source][..., None] for x in (blocks.prefix, blocks.start))
        behind = start + places.block[:, None, None]
        known = mine[..., None] & ((column < prefix) | ((column >= start) & (column < behind)))
        at = torch.where(column < prefix, column, column - start + prefix)
        at = torch.div(at, tile_k, rounding_mode="floor").clamp(0, scores.shape[-1] - 1)
        picked = torch.gather(scores, 3, at[:, None].expand(-1, scores.shape[1], -1, -1))
        return torch.where(known[:, None], picked, near.to(picked.dtype))
