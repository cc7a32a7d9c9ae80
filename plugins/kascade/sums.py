"""Attention summed over the rows of a tile and the query heads of a KV head, by key; and the keys of most of it."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.priority import Priority, tiles_of_columns
from sparseprefill.statistics.sampled import PAIRS, PAIRS_ON_CPU, Logits

from .budget import Budget, Layout, Rows

SLAB = 256 << 20
"""Bytes of the sums that are held at a time: those of some tiles, over all keys."""


def column_sums(call: AttentionCall, rows: Rows, until: int) -> Tensor:
    """``[B, Hkv, n, until]``: attention of the rows, by the key's position on the batch row's grid; plain PyTorch."""
    geometry, (batch, tiles, count) = call.geometry, rows.index.shape
    logits = Logits(call, rows.index.flatten(1), rows.weight.flatten(1) > 0)
    lse = rows.lse(call)
    base = torch.where(lse.isneginf(), 0.0, lse)[..., None]
    weight = rows.weight.flatten(1)[:, None, :, None]
    pairs = PAIRS_ON_CPU if call.q.device.type == "cpu" else PAIRS
    step = max(64, pairs // (batch * geometry.heads * tiles * count))
    found = []
    for first in range(0, until, step):
        mass = logits.at(slice(first, min(first + step, until))).sub_(base).exp_().mul_(weight)
        by_tile = mass.unflatten(2, (tiles, count)).sum(3)
        found.append(by_tile.unflatten(1, (-1, call.group)).sum(2))
    return torch.cat(found, -1)


def choose(call: AttentionCall, budget: Budget, count: int) -> IndexLists:
    """Lists ``[B, Hkv, G]``: of the keys before each tile those of the largest sums; of equal ones the first.

    count: rows of a tile that are summed. The sums of all tiles would be a matrix of tiles and keys, so tiles are done
    a slab at a time.
    """
    geometry, layout = call.geometry, Layout.of(call, budget)
    batch, tiles = layout.start.shape
    rows = Rows.of(geometry, geometry.tiles(budget.tile), budget.tile, count, call.q.dtype)
    spot = torch.arange(batch * call.kv_heads, device=geometry.device).view(batch, call.kv_heads, 1) * layout.size
    offsets = spot + layout.offsets
    counts = layout.columns.to(torch.int32)[:, None].expand(-1, call.kv_heads, -1).contiguous()
    room = torch.empty(batch * call.kv_heads * layout.size + 1, dtype=torch.int32, device=geometry.device)
    lists = IndexLists(counts, offsets, room, sound=True)
    last = (geometry.q_offset // budget.tile + tiles - 1) * budget.tile  # no tile of any batch row begins behind
    if last <= 0 or layout.size == 0:
        return lists
    some = max(1, SLAB // (batch * call.kv_heads * last * rows.weight.element_size()))
    for first in range(0, tiles, some):
        part = slice(first, min(first + some, tiles))
        until = min(last, (geometry.q_offset // budget.tile + part.stop - 1) * budget.tile)
        if until <= 0:
            continue
        some_rows = Rows(rows.index[:, part], rows.weight[:, part])
        if kernels.serve_rows(call.q):
            from . import kernels as gpu

            sums = gpu.column_sums(call, some_rows, layout.start[:, part], until)
            gpu.top_columns(sums, layout.start, lists, part)
        else:
            _top_columns(column_sums(call, some_rows, until), layout.start[:, part], lists, part)
    return lists


def _top_columns(sums: Tensor, start: Tensor, lists: IndexLists, part: slice) -> None:
    """Write the lists of some tiles from sums ``[B, Hkv, n, X]``, of which those before `start` ``[B, n]`` count."""
    key = torch.arange(sums.shape[3], device=sums.device)
    before = (key < start[..., None])[:, None]
    score = torch.where(sums > 0, sums, 0.0)  # NaN counts as nothing
    order = torch.sort(torch.where(before, score, -1.0), dim=-1, descending=True, stable=True).indices
    counts = lists.counts[:, :, part, None]
    keep = torch.zeros_like(before.expand_as(sums)).scatter_(-1, order, key.expand_as(order) < counts)
    behind = lists.indices.numel() - 1  # the last entry takes what is not kept
    place = lists.offsets[:, :, part, None] + keep.cumsum(-1) - 1
    place = torch.where(keep, place, behind).flatten()
    lists.indices.scatter_(0, place, key.to(torch.int32).expand_as(sums).flatten())


@frozen(eq=False)
class SumsPriority(Priority):
    """The mean share of a key in the rows that are summed for a tile, over the query heads of a KV head.

    Made from the call's own queries where somebody asks, in layers too that take another layer's keys.
    """

    tile: int
    sampled: int

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """See `Priority`: the mean of a tile's columns."""
        return tiles_of_columns(self, call, self.tile, tile_q, tile_k)

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        chosen = range(call.geometry.heads)[heads]
        kv = slice(chosen.start // call.group, (chosen.stop - 1) // call.group + 1)
        k, v = call.narrow(kv, call.kv_len)
        query = slice(kv.start * call.group, kv.stop * call.group)
        part = evolve(call, q=call.q[:, query], k=k, v=v, sinks=None)
        tiles = position // self.tile
        rows = Rows.of(part.geometry, tiles, self.tile, self.sampled, call.q.dtype)
        total = (rows.weight.sum(-1) * call.group).clamp(min=1)[:, None, :, None]
        head = torch.arange(chosen.start, chosen.stop, device=position.device)
        of = head // call.group - kv.start
        return (column_sums(part, rows, call.kv_len) / total)[:, of]
