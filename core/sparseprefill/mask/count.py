"""Pairs that a mask selects, counted on the device: no host synchronisation, and no list is walked where it can jump.

Lists ascend, so of each list only the few entries at the causal edge (and at a window's far edge) need a look; binary
search finds them, and all between count as whole.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.lists import IndexLists, pairs_by_kernel

ENTRIES = 1 << 23
"""Numbers of one temporary tensor at most, where a single head does not need more."""


@frozen(eq=False)
class _Rows:
    """Query tiles: first and last real position of each, int64 ``[B, 1, R]`` (none where last < first), and the window.

    Keys in [low, high) are seen by every row; both lie on the grid of key tiles of `width`. count: real rows. edge: the
    most keys that one of the `edges` can hold.
    """

    first: Tensor
    last: Tensor
    window: int | None
    low: Tensor
    high: Tensor
    count: Tensor
    edge: int

    @classmethod
    def of(cls, geometry: Geometry, tile_q: int, width: int) -> _Rows:
        tile, (start, _, behind) = geometry.tiles(tile_q), (x[:, None] for x in geometry.token_range())
        first = torch.maximum(tile * tile_q, start)
        last = torch.maximum(torch.minimum((tile + 1) * tile_q, behind) - 1, first - 1)
        first, last = first[:, None], last[:, None]
        high = (first + 1) // width * width
        low = torch.zeros_like(high)
        if geometry.window is not None:
            low = (last - geometry.window + width).clamp(min=0) // width * width
        return cls(first, last, geometry.window, low, torch.maximum(low, high), last + 1 - first, tile_q + width)

    @property
    def edges(self) -> list[tuple[Tensor, Tensor]]:
        """Half-open ranges of keys beside [low, high) that hold every other key which some row sees; may be empty."""
        found = [(self.high, self.last + 1)]
        if self.window is not None:
            found.append(((self.first - self.window + 1).clamp(min=0), self.low))
        return found

    def pairs(self, lo: Tensor, width: int) -> Tensor:
        """Allowed pairs with keys lo .. lo + width - 1; lo: ``[B, H, R, n]``."""
        first, behind = self.first[..., None], self.last[..., None] + 1
        pairs = _ramp(behind - lo, width) - _ramp(first - lo, width)
        if self.window is not None:
            pairs = pairs - _ramp(behind - self.window - lo, width) + _ramp(first - self.window - lo, width)
        return pairs


@frozen(eq=False)
class Lists:
    """Lists ``[B, H, R]`` of key blocks by query tile: int64 counts and offsets, and the entries' storage.

    width: tokens of a block. columns: a number that no entry reaches.
    """

    counts: Tensor
    offsets: Tensor
    indices: Tensor
    width: int
    columns: int

    @classmethod
    def of(cls, lists: IndexLists, heads: slice, width: int, geometry: Geometry) -> Lists:
        """The lists of some heads."""
        counts = lists.counts[:, heads].to(torch.int64)
        return cls(counts, lists.offsets[:, heads], lists.indices, width, geometry.tile_columns(width))

    def of_rows(self, row: Tensor) -> Lists:
        """The list of each query tile; row: int64 ``[B, R]``."""
        counts, offsets = (torch.take_along_dim(x, row[:, None], 2) for x in (self.counts, self.offsets))
        return evolve(self, counts=counts, offsets=offsets)

    def part(self, rows: slice) -> Lists:
        """Some of the rows."""
        return evolve(self, counts=self.counts[:, :, rows], offsets=self.offsets[:, :, rows])

    def below(self, bound: Tensor) -> Tensor:
        """int64: how many entries of each list are < bound; bound broadcasts to ``[B, H, R]`` or ``[B, H, R, n]``."""
        tail = bound.dim() - self.counts.dim()
        counts = self.counts.view(*self.counts.shape, *[1] * tail)
        offsets = self.offsets.view(*self.offsets.shape, *[1] * tail)
        low: Tensor
        low, bound = torch.broadcast_tensors(torch.zeros_like(counts), bound)
        high = counts.expand_as(low)
        for _ in range(self.columns.bit_length()):
            middle = (low + high) // 2
            less = (middle < high) & (self._entry(offsets + middle) < bound)
            high = torch.where(less, high, middle)
            low = torch.where(less, middle + 1, low)
        return low

    def take(self, first: Tensor, number: int) -> Tensor:
        """int64 ``[B, H, R, number]``: entries from slot `first` ``[B, H, R]`` on; anything behind a list's end."""
        slot = first[..., None] + torch.arange(number, device=first.device)
        return self._entry(self.offsets[..., None] + slot)

    def holds(self, index: Tensor) -> Tensor:
        """bool like index ``[B, H, R, n]``: whether the list has the entry."""
        at = self.below(index)
        found: Tensor = (at < self.counts[..., None]) & (self._entry(self.offsets[..., None] + at) == index)
        return found

    def _entry(self, where: Tensor) -> Tensor:
        return self.indices[where.clamp(0, self.indices.numel() - 1)].to(torch.int64)


def by_tile(
    geometry: Geometry,
    sizes: tuple[int, int, int, int],
    tiles: IndexLists | None,
    stripes: IndexLists | None,
    *,
    disjoint: bool,
) -> Tensor:
    """int64 ``[B, Hq, n]`` on the lists' device: allowed pairs selected, each once. n: query tiles where kernels count,
    in one launch; else 1.

    sizes: tokens of a query tile and of a key tile, query tiles that share a list of stripes, and tokens of a stripe.
    disjoint: no stripe lies in a selected tile of its query tile group. In plain PyTorch a few heads at a time, so that
    memory stays at that of a few heads' rows.
    """
    counted = pairs_by_kernel(geometry, sizes, tiles, stripes, disjoint=disjoint)
    if counted is not None:
        return counted
    lists = (tiles, stripes)
    if all(one.same_heads for one in lists if one is not None):
        return _of_heads(geometry, sizes, lists, disjoint, slice(0, 1)).expand(-1, geometry.heads)[..., None]
    rows = geometry.batch * geometry.tile_rows(sizes[0])
    size = max(1, ENTRIES // (rows * (sizes[0] + 2 * sizes[1])))
    heads = (slice(h, min(h + size, geometry.heads)) for h in range(0, geometry.heads, size))
    return torch.cat([_of_heads(geometry, sizes, lists, disjoint, part) for part in heads], 1)[..., None]


def _of_heads(
    geometry: Geometry,
    sizes: tuple[int, int, int, int],
    lists: tuple[IndexLists | None, IndexLists | None],
    disjoint: bool,
    heads: slice,
) -> Tensor:
    tile_q, tile_k, size, width = sizes
    rows = _Rows.of(geometry, tile_q, tile_k)
    total = torch.zeros(geometry.batch, heads.stop - heads.start, dtype=torch.int64, device=geometry.device)
    tiles, stripes = (
        None if one is None else Lists.of(one, heads, of, geometry)
        for one, of in zip(lists, (tile_k, width), strict=True)
    )
    if tiles is not None:
        total = total + _pairs(rows, tiles)
    if stripes is not None:
        group = geometry.tile_at(geometry.tiles(tile_q) * tile_q, tile_q * size)
        by_tile = stripes.of_rows(group)
        total = total + _pairs(rows, by_tile)
        if tiles is not None and not disjoint:
            total = total - _pairs(rows, by_tile, tiles) - _inner_twice(rows, tiles, stripes, group)
    return total


def share(pairs: Tensor, geometry: Geometry) -> float:
    """The share that int64 pairs ``[B, Hq]`` are of the allowed ones; 0 where none is allowed (host sync)."""
    allowed = allowed_pairs(geometry)
    return int(pairs.sum()) / allowed if allowed else 0.0


def allowed_pairs(geometry: Geometry) -> int:
    """Pairs that causality, window and padding allow, over batch and heads (host sync)."""
    return int(geometry.visible_counts().sum()) * geometry.heads


def _pairs(rows: _Rows, lists: Lists, tiles: Lists | None = None) -> Tensor:
    """``[B, H]``: pairs of the entries; with `tiles`, of those at the edges alone that lie in a tile of their row."""
    width, most = lists.width, rows.edge // lists.width + 2
    total = torch.zeros_like(lists.counts)
    if tiles is None:
        total = (lists.below(rows.high // width) - lists.below(rows.low // width)) * width * rows.count
    for start, behind in rows.edges:
        first = lists.below(start // width)
        end = lists.below((behind + width - 1) // width)
        lo = lists.take(first, most) * width
        inside = torch.arange(most, device=lo.device) < (end - first)[..., None]
        if tiles is not None:
            inside = inside & tiles.holds(lo // tiles.width)
        total = total + (rows.pairs(lo, width) * inside).sum(-1)
    return total.sum(-1)


def _inner_twice(rows: _Rows, tiles: Lists, stripes: Lists, group: Tensor) -> Tensor:
    """``[B, H]``: pairs of the stripes between the edges that lie in a tile of their row.

    Walks the tiles, as each holds another number of stripes. stripes: lists by group of query tiles. group: int64
    ``[B, R]``.
    """
    batch, heads, number = tiles.counts.shape
    low, high = tiles.below(rows.low // tiles.width), tiles.below(rows.high // tiles.width)
    slots = torch.arange(tiles.columns, device=low.device)
    edges = (torch.arange(tiles.columns + 1, device=low.device) * (tiles.width // stripes.width))[None, None, None]
    step = max(1, ENTRIES // (batch * heads * tiles.columns))
    total = torch.zeros(batch, heads, dtype=torch.int64, device=low.device)
    for first in range(0, number, step):
        part = slice(first, first + step)
        held = stripes.of_rows(group[:, part]).below(edges).diff(dim=-1) * stripes.width
        tile = tiles.part(part).take(torch.zeros_like(low[:, :, part]), tiles.columns).clamp(0, tiles.columns - 1)
        inside = (slots >= low[:, :, part, None]) & (slots < high[:, :, part, None])
        total += ((torch.gather(held, 3, tile) * inside).sum(-1) * rows.count[:, :, part]).sum(-1)
    return total


def _ramp(n: Tensor, width: int) -> Tensor:
    """Sum of clamp(t, 0, width) over t = 1..n."""
    n = n.clamp(min=0)
    low = n.clamp(max=width)
    return low * (low + 1) // 2 + (n - low) * width
