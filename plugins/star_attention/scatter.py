"""From the call of all blocks back to the call: masks and softmax states in the places of their tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import SoftmaxState

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

    from .blocks import Blocks
    from .sizes import Sizes


@frozen(eq=False)
class Places:
    """Where each row of a call is found in the call of its blocks. block, context: int64 ``[B]``, in tokens."""

    geometry: Geometry
    blocks: Blocks
    block: Tensor
    context: Tensor
    tile: int

    @classmethod
    def of(cls, geometry: Geometry, blocks: Blocks, sizes: Sizes, tile: int) -> Places:
        """From sizes in tiles."""
        return cls(geometry, blocks, sizes.block * tile, sizes.context * tile, tile)

    def find(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For positions ``[B, R]``: bool, whether phase 1 has them; int64 row of the blocks' call; position there."""
        number = (
            torch.div(position.clamp(min=0), self.block[:, None], rounding_mode="floor") - self.blocks.first[:, None]
        )
        mine = (position >= 0) & (position < self.context[:, None]) & (number >= 0) & (number < self.blocks.count)
        number = number.clamp(0, self.blocks.count - 1)
        shift = torch.gather(self.blocks.start - self.blocks.prefix, 1, number)
        base = torch.arange(self.geometry.batch, device=position.device)[:, None] * self.blocks.count
        return mine, base + number, position - shift

    def mask(self, mask: SparseMask, *, dense: bool) -> SparseMask:
        """A mask of the blocks' call as one of the call. dense: rows of phase 2 see every key, else none."""
        g = self.geometry
        tile_q, tile_k = math.gcd(self.tile, mask.tile_q), math.gcd(self.tile, mask.tile_k)
        position = g.tiles(tile_q) * tile_q
        tiles = stripes = None
        width = math.gcd(mask.stripe_width, tile_k)
        if mask.tiles is not None:
            tiles = self._lists(mask.tiles, mask, mask.tile_q, (mask.tile_k, tile_k), position)
        if mask.stripes is not None:
            stripes = self._lists(mask.stripes, mask, mask.group_rows, (mask.stripe_width, width), position)
        if dense:
            if tiles is None:
                tiles = IndexLists.empty(g.batch, g.heads, position.shape[1], g.device)
            tiles = tiles.filled(position >= self.context[:, None], g, tile_q, tile_k)
        return SparseMask(g, tile_q, tile_k, tiles, 1, stripes, disjoint=mask.disjoint, stripe_width=width)

    def state(self, state: SoftmaxState) -> SoftmaxState:
        """A state of the blocks' call as one of the call; nothing attended to in rows of phase 2."""
        position = self.geometry.query_positions()
        mine, row, _ = self.find(position)
        first = self.blocks.query.flatten()[row]
        index = (position - first).clamp(0, state.m.shape[2] - 1)
        keep = (mine & self.geometry.real_queries())[:, None]
        row, index = row[:, None], index[:, None]
        head = torch.arange(self.geometry.heads, device=position.device)[:, None]
        m, l, acc = (x[row, head, index] for x in (state.m, state.l, state.acc))  # noqa: E741
        # In place: acc of 128K tokens is gigabytes.
        return SoftmaxState(
            m.masked_fill_(~keep, -torch.inf), l.masked_fill_(~keep, 0), acc.masked_fill_(~keep[..., None], 0)
        )

    def _lists(
        self, lists: IndexLists, mask: SparseMask, rows: int, tile: tuple[int, int], position: Tensor
    ) -> IndexLists:
        """Lists by rows of `rows` tokens of the blocks' call, as lists for the tiles that begin at `position`."""
        mine, source, inside = self.find(position)
        there = mask.geometry.first_tile(rows)[source]
        row = (torch.div(inside, rows, rounding_mode="floor") - there).clamp(0, lists.counts.shape[2] - 1)
        moved = self._moved(lists, mask.geometry, tile)
        counts, offsets = (x[source, :, row].transpose(1, 2) for x in (moved.counts, moved.offsets))
        counts = torch.where(mine[:, None], counts, 0).contiguous()
        return IndexLists(counts, offsets.contiguous(), moved.indices)

    def _moved(self, lists: IndexLists, geometry: Geometry, tile: tuple[int, int]) -> IndexLists:
        """The same lists in key tiles of ``tile[1]`` tokens (from ``tile[0]``), at the places of the call's keys."""
        old, new = tile
        columns, bound = geometry.tile_columns(old), self.geometry.tile_columns(new)
        column = torch.arange(columns * (old // new), device=self.geometry.device, dtype=torch.int32)
        prefix = torch.div(self.blocks.prefix, new, rounding_mode="floor").flatten().to(torch.int32)
        jump = torch.div(self.blocks.start, new, rounding_mode="floor").flatten().to(torch.int32) - prefix
        parts = []
        for row in range(geometry.batch):  # one block at a time: a map of all of them would be large
            one = slice(row, row + 1)
            keep = IndexLists(lists.counts[one], lists.offsets[one], lists.indices).to_map(columns)
            inside = (column < prefix[row]) | (column + jump[row] < bound)
            part = IndexLists.from_map(keep.repeat_interleave(old // new, dim=-1) & inside)
            parts.append(evolve(part, indices=part.indices + torch.where(part.indices < prefix[row], 0, jump[row])))
        return IndexLists.joined(parts, 0)
