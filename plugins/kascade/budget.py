"""The tiles of anchor layers: how many keys each keeps, where their lists stand, and which of its rows are summed."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.mask.geometry import Geometry, kept, kept_by_sizes
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.statistics.by_tile import row_lse

QUERY_TILE = 128
"""Tokens of the mask's query tiles, where they divide a tile of the method: those of the fastest kernel."""


@frozen
class Budget:
    """k(n) = min(max(least, topk n), n), rounded up to a multiple of `least`; n: keys before a tile."""

    topk: float
    least: int
    tile: int

    @property
    def tile_q(self) -> int:
        """Tokens of the mask's tiles."""
        return QUERY_TILE if self.tile % QUERY_TILE == 0 else self.tile

    def columns(self, start: Tensor) -> Tensor:
        """int64 like `start`, the first position of each tile: keys before it that the tile keeps.

        0 where it keeps all of them, as there are no more than its share, and none are to be chosen.
        """
        share = self._share(start)
        return torch.where(share < start, share, 0)

    def room(self, start: Tensor) -> Tensor:
        """int64 like `start`: a bound of `columns` for tiles that begin there or before."""
        return torch.minimum(self._share(start), start)

    def _share(self, n: Tensor) -> Tensor:
        wide = n.to(torch.float64)
        wanted = torch.minimum((wide * self.topk).clamp(min=self.least), wide)
        return ((wanted / self.least).ceil() * self.least).to(torch.int64)


@frozen(eq=False)
class Layout:
    """The tiles of a call. start, columns: int64 ``[B, G]``, first position, and how many keys are chosen.

    offsets: int64 ``[G]``, where a tile's list begins in the storage of one KV head, of `size` entries.
    """

    start: Tensor
    columns: Tensor
    offsets: Tensor
    size: int

    @classmethod
    def of(cls, call: AttentionCall, budget: Budget) -> Layout:
        """From sizes and padding; nothing is read on the host."""
        geometry = call.geometry
        start = geometry.tiles(budget.tile) * budget.tile
        columns = budget.columns(start)
        # A tile beyond the row's last key has no queries, and its share, rounded up, may be more than there are keys.
        columns = torch.where(start < geometry.key_counts()[:, None], columns, 0)
        first, rows = geometry.q_offset // budget.tile, geometry.tile_rows(budget.tile)
        return cls(start, columns, *_offsets(budget, first, rows, geometry.starts is None, geometry.device))


@kept
def _offsets(budget: Budget, first: int, rows: int, exact: bool, device: torch.device) -> tuple[Tensor, int]:
    def ends(where: torch.device) -> Tensor:
        start = (torch.arange(rows, device=where) + first) * budget.tile
        return (budget.columns(start) if exact else budget.room(start)).cumsum(0)

    # The same sums twice, so that the host needs not wait for its number.
    each, size = ends(device), int(ends(torch.device("cpu"))[-1])
    return torch.cat([each.new_zeros(1), each[:-1]]), size


def mask_of(call: AttentionCall, budget: Budget, stripes: IndexLists) -> SparseMask:
    """The columns before each tile, lists ``[B, Hq, G]``, and the tile's own keys; where none are chosen, all keys."""
    group, own = budget.tile // budget.tile_q, _own(call.geometry, budget)
    return SparseMask(call.geometry, budget.tile_q, budget.tile_q, own, group, stripes, disjoint=True)


@kept_by_sizes()
def _own(geometry: Geometry, budget: Budget) -> IndexLists:
    """Key tiles from the first of each tile on; every list is a run of one `arange`."""
    size = budget.tile_q
    tile = geometry.tiles(size)
    start = tile * size // budget.tile * budget.tile
    chosen = budget.columns(start) > 0
    behind = torch.where(tile >= 0, tile + 1, 0).clamp(max=geometry.tile_columns(size))
    first = torch.where(chosen, start // size, 0)
    shape = (-1, geometry.heads, -1)
    counts = (behind - first).clamp(min=0).to(torch.int32)[:, None].expand(shape).contiguous()
    indices = torch.arange(geometry.tile_columns(size), dtype=torch.int32, device=geometry.device)
    return IndexLists(counts, first[:, None].expand(shape).contiguous(), indices, same_heads=True, sound=True)


@frozen(eq=False)
class Rows:
    """The rows of some tiles that are summed, ``[B, n, R]``: index of each, int64, and for how many rows it stands.

    weight is float32 (float64 for float64 calls), 0 where there is no such row.
    """

    index: Tensor
    weight: Tensor

    @classmethod
    def of(cls, geometry: Geometry, tiles: Tensor, tile: int, count: int, dtype: torch.dtype) -> Rows:
        """A tile's rows in `count` stretches, the last real row of each for all of it. tiles: int64 ``[B, n]``.
        dtype: of the queries."""
        edges = torch.arange(count + 1, device=tiles.device) * tile // count
        first, low, behind = (x[:, None, None] for x in geometry.token_range())
        at = torch.minimum((tiles[..., None] * tile + edges).clamp(min=low), torch.maximum(behind, low))
        index = (at[..., 1:] - 1 - first).clamp(0, geometry.q_len - 1)
        return cls(index, (at[..., 1:] - at[..., :-1]).to(torch.promote_types(dtype, torch.float32)))

    def lse(self, call: AttentionCall) -> Tensor:
        """``[B, Hq, n * R]``: of each row over all keys that it may see."""
        return row_lse(call, self.index.flatten(1), self.weight.flatten(1) > 0)
