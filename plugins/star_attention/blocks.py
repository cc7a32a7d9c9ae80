"""Phase 1 as one call, in which every (anchor, block) of every batch row is a batch row of its own (section 2.1).

What is found there, masks and softmax states, goes back to the places of its tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import SoftmaxState

from .sizes import Sizes


@frozen(eq=False)
class Blocks:
    """The call of all blocks, and where its rows belong. All positions and lengths are in tokens.

    call: ``[B * n, H, *, D]``; row ``b * n + j`` holds the keys (prefix, block) of the j-th block that batch row b
    touches, in the order of their positions, and the block's queries; a row to spare holds a single token.
    start, prefix: int64 ``[B, n]``: first position of the block, and keys of the anchor before it.
    first: int64 ``[B]``: index of the first block touched. query: int64 ``[B, n]``: position of the first query.
    geometry: of the call that was cut into blocks. block, context: int64 ``[B]``, its sizes. tile: of the method.
    """

    call: AttentionCall
    start: Tensor
    prefix: Tensor
    first: Tensor
    query: Tensor
    geometry: Geometry
    block: Tensor
    context: Tensor
    tile: int

    @classmethod
    def of(cls, call: AttentionCall, sizes: Sizes) -> Blocks:
        """Gathers q, k and v; nothing is read on the host."""
        g, tile = call.geometry, sizes.tile
        block, anchor, context = sizes.block * tile, sizes.anchor * tile, sizes.context * tile
        row, _, behind = g.token_range()
        first = row.clamp(min=0) // block
        touched = g.tile_rows(sizes.most_block * tile) if sizes.uniform else sizes.most_blocks
        start = torch.arange(min(sizes.most_blocks, touched), device=g.device)
        start = (first[:, None] + start) * block[:, None]
        end = torch.minimum(start + block[:, None], torch.minimum(behind, context)[:, None])
        query = torch.maximum(start, row[:, None])
        prefix = torch.minimum(anchor[:, None], start)
        real = query < end
        keys, before = (torch.where(real, x, y) for x, y in ((prefix + end - start, 1), (prefix + query - start, 0)))
        # Row 0 of a block's queries stands behind `before` keys. Padding on the left brings all rows to one offset.
        q_rows = min(sizes.most_block * tile, g.q_len)
        offset = min(sizes.most_anchor * tile, g.kv_len) + _cut(g, sizes)
        pad = offset - before
        inside = torch.arange(offset + q_rows, device=g.device) - pad[..., None]
        position = inside + torch.where(inside < prefix[..., None], 0, (start - prefix)[..., None])
        left = 0 if g.starts is None else g.starts[:, None, None]
        index = torch.where(real[..., None], position, 0) + left
        rows = query[..., None] - row[:, None, None] + torch.arange(q_rows, device=g.device)
        k, v = _keys(call, index)
        starts, lengths = (x.flatten().to(torch.int32) for x in (pad, keys))
        whole: dict[str, Any] = dict.fromkeys(("q_offset", "prompt_lengths", "window"))
        made = evolve(call, q=_gather(call.q, rows), k=k, v=v, starts=starts, lengths=lengths, **whole)
        return cls(made, start, prefix, first, query, g, block, context, tile)

    def find(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For positions ``[B, R]``: bool, whether phase 1 has them; int64 row of the blocks' call; position there."""
        count = self.start.shape[1]
        number = position.clamp(min=0) // self.block[:, None] - self.first[:, None]
        mine = (position >= 0) & (position < self.context[:, None]) & (number >= 0) & (number < count)
        number = number.clamp(0, count - 1)
        base = torch.arange(self.geometry.batch, device=position.device)[:, None] * count
        return mine, base + number, position - torch.gather(self.start - self.prefix, 1, number)

    def mask(self, mask: SparseMask, *, dense: bool) -> SparseMask:
        """A mask of the blocks' call as one of the whole. dense: rows of phase 2 see every key, else none."""
        g = self.geometry
        tile_q, tile_k = math.gcd(self.tile, mask.tile_q), math.gcd(self.tile, mask.tile_k)
        position = g.tiles(tile_q) * tile_q
        tiles = stripes = None
        width = math.gcd(mask.stripe_width, tile_k)
        if mask.tiles is not None:
            tiles = self._lists(mask.tiles, mask.tile_q, (mask.tile_k, tile_k), position)
        if mask.stripes is not None:
            stripes = self._lists(mask.stripes, mask.group_rows, (mask.stripe_width, width), position)
        if dense:
            if tiles is None:
                tiles = IndexLists.empty(g.batch, g.heads, position.shape[1], g.device)
            tiles = tiles.filled(position >= self.context[:, None], g, tile_q, tile_k)
        return SparseMask(g, tile_q, tile_k, tiles, 1, stripes, disjoint=mask.disjoint, stripe_width=width)

    def state(self, state: SoftmaxState) -> SoftmaxState:
        """A state of the blocks' call as one of the whole; nothing attended to in rows of phase 2."""
        position = self.geometry.query_positions()
        mine, row, _ = self.find(position)
        index = (position - self.query.flatten()[row]).clamp(0, state.m.shape[2] - 1)[:, None]
        keep = (mine & self.geometry.real_queries())[:, None]
        head = torch.arange(self.geometry.heads, device=position.device)[:, None]
        m, l, acc = (x[row[:, None], head, index] for x in (state.m, state.l, state.acc))  # noqa: E741
        # In place: acc of 128K tokens is gigabytes.
        return SoftmaxState(
            m.masked_fill_(~keep, -torch.inf), l.masked_fill_(~keep, 0), acc.masked_fill_(~keep[..., None], 0)
        )

    def _lists(self, lists: IndexLists, rows: int, tile: tuple[int, int], position: Tensor) -> IndexLists:
        """Lists by rows of `rows` tokens of the blocks' call, as lists for the tiles that begin at `position`."""
        mine, source, inside = self.find(position)
        there = self.call.geometry.first_tile(rows)[source]
        row = (inside // rows - there).clamp(0, lists.counts.shape[2] - 1)
        moved = self._moved(lists, *tile)
        counts, offsets = (x[source, :, row].transpose(1, 2) for x in (moved.counts, moved.offsets))
        counts = torch.where(mine[:, None], counts, 0).contiguous()
        return IndexLists(counts, offsets.contiguous(), moved.indices, sound=moved.sound)

    def _moved(self, lists: IndexLists, old: int, new: int) -> IndexLists:
        """Lists in key tiles of `new` tokens (from `old`), at the places of the whole call's keys."""
        columns, bound = self.call.geometry.tile_columns(old), self.geometry.tile_columns(new)
        column = torch.arange(columns * (old // new), device=self.geometry.device, dtype=torch.int32)
        prefix = (self.prefix // new).flatten().to(torch.int32)
        jump = (self.start // new).flatten().to(torch.int32) - prefix
        parts = []
        for row in range(self.call.geometry.batch):  # one block at a time: a map of all of them would be large
            one = slice(row, row + 1)
            keep = IndexLists(lists.counts[one], lists.offsets[one], lists.indices).to_map(columns)
            inside = (column < prefix[row]) | (column + jump[row] < bound)
            part = IndexLists.from_map(keep.repeat_interleave(old // new, dim=-1) & inside)
            moved = part.indices + torch.where(part.indices < prefix[row], 0, jump[row])
            parts.append(IndexLists(part.counts, part.offsets, moved, sound=part.sound))
        return IndexLists.joined(parts, 0)


def _cut(g: Geometry, sizes: Sizes) -> int:
    """Most tokens by which the first query of a chunk may stand inside its block."""
    block = sizes.most_block * sizes.tile
    if sizes.uniform and g.starts is None:
        return g.q_offset % block
    return 0 if g.q_offset == 0 else block - 1


def _keys(call: AttentionCall, index: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values by index ``[B, n, M]`` (clamped): ``[B * n, Hkv, M, *]`` each; of pages no others are read."""
    if call.pages is None:
        return _gather(call.k, index), _gather(call.v, index)
    flat = index.clamp(0, call.kv_len - 1).flatten(1)
    k, v = (x[0].unflatten(1, index.shape[1:]).transpose(0, 1) for x in (call.keys_at(flat), call.values_at(flat)))
    return k, v


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x ``[B, H, N, D]`` by index ``[B, n, M]`` (clamped): ``[B * n, H, M, D]``."""
    heads, length, width = x.shape[1:]
    index = index.clamp(0, length - 1)
    where = index[:, :, None, :, None].expand(-1, -1, heads, -1, width)
    return torch.gather(x[:, None].expand(-1, index.shape[1], -1, -1, -1), 3, where).flatten(0, 1)
