"""Bounds on what a query tile may cost: at least, or at most, so many key tiles, or such a share of them.

A ceiling ranks tiles and stripes together, by worth per key. A group of stripes may span the whole call, in which each
query tile has room of its own. So stripes are dealt to query tiles one by one: columns are sorted once for their group,
and each query tile takes as many of the first as it can. How many those are is counted by table, `blocks` of neighbours
in the order by key tiles, and not column by column.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.errors import ParameterError, printed
from sparseprefill.mask.geometry import Geometry, reachable_map
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.plan import Plan
from sparseprefill.refiners.narrow import TOP, Choice, column_worth, descending, first_of, highest, tile_worth
from sparseprefill.stages import HeadScope
from sparseprefill.validate import maybe, number, whole

ENTRIES, CELLS = 1 << 23, 1 << 24
"""Entries of one temporary tensor, where a single list does not need more: of sorts and tables, and of bool maps."""
BLOCKS = 256
"""Blocks into which the order of a group's columns is divided."""


@frozen(kw_only=True)
class _Budget:
    """tiles: a number of key tiles. share: of the key tiles that a query tile can see. One of them."""

    tiles: int | None = field(default=None, validator=maybe(whole()))
    share: float | None = field(default=None, validator=maybe(number(0.0, 1.0)))

    def __attrs_post_init__(self) -> None:
        if (self.tiles is None) == (self.share is None):
            given = f"tiles={printed(self.tiles)}, share={printed(self.share)}"
            raise ParameterError(f"{type(self).__name__}({given}): pass either tiles or share")

    def _exact(self, seen: Tensor) -> Tensor:
        """The budget per query tile before rounding, of those that can see `seen` key tiles."""
        return seen.double() * self.share if self.share is not None else torch.full_like(seen, self.tiles or 0).double()

    def _most(self, columns: int) -> int:
        """The largest budget of a query tile, in key tiles of which there are so many; known on the host."""
        return math.floor(columns * self.share) if self.share is not None else min(self.tiles or 0, columns)


@frozen(kw_only=True)
class BudgetFloor(_Budget):
    """Each query tile keeps at least `tiles` key tiles, or a `share` of those that it can see, rounded up.

    What is missing comes by the estimator's scores (`Plan.priority`), else the nearest first. Tiles of a carry's region
    count; stripes do not, so that the floor holds whatever they cover.
    """

    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    @uncast
    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the tiles of highest priority."""
        geometry, grid = call.geometry, plan.common_grid()
        reach = reachable_map(geometry, *grid)[:, None]
        have = plan.tiles_on(*grid)
        wanted = torch.ceil(self._exact(reach.sum(-1))).to(torch.int64)
        added = highest(tile_worth(plan, call, *grid), reach & ~have, wanted - have.sum(-1))
        return plan.widen(SparseMask.from_rules(call, grid, keep=added))


@frozen(kw_only=True)
class BudgetCeiling(_Budget):
    """Each query tile keeps at most `tiles` key tiles, or a `share` of those that it can see, rounded down.

    The budget of a query tile is counted in keys: a key tile costs `tile_k` of them, a stripe one, and nothing in a
    tile that is kept. The diagonal goes first and is never dropped, not even by a budget below it. Then come the first
    `sink` key tiles, the `local` tiles before the diagonal, and the rest of the tiles and stripes, ranked together: by
    worth per key in the estimator's scores (`Plan.priority`; NaN last), else the nearest first. What is left of a
    budget when the next tile does not fit goes to the next stripes. A carry's region is computed already: its tiles
    count, and stay.

    Each query tile chooses its stripes for itself, so the plan that comes out has stripes by query tile, whatever
    groups shared them before: index memory of 4 bytes for each stripe of each query tile that the budget has room for.
    """

    sink: int = field(default=1, validator=whole(0))
    local: int = field(default=1, validator=whole(0))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and lists of the stripes that budgets have room for."""
        geometry, tile = call.geometry, 128
        rows, columns = geometry.tile_rows(tile), geometry.tile_columns(tile)
        return default_workspace(call) + geometry.batch * geometry.heads * rows * self._most(columns) * tile * 4

    @uncast
    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Drops the tiles and stripes of lowest priority."""
        geometry, at = call.geometry, Choice.of(call, plan)
        grid, own = at.grid, at.own
        budget = torch.floor(self._exact(at.reach.sum(-1))).to(torch.int64) - at.taken - own.sum(-1)
        scores, wanted = self._scores(tile_worth(plan, call, *grid), geometry, grid), at.tiles & ~own
        if plan.mask.stripes is None:
            return at.narrowed(plan, highest(scores, wanted, budget) | own, None)
        tiles = Tiles(*grid, wanted, at.free, scores, budget * grid[1])
        kept, stripes = fitted(call, plan, tiles, self._most(geometry.tile_columns(grid[1])) * grid[1])
        return at.narrowed(plan, kept | own, stripes)

    def _scores(self, scores: Tensor, geometry: Geometry, grid: tuple[int, int]) -> Tensor:
        column = torch.arange(geometry.tile_columns(grid[1]), device=geometry.device)
        first = (geometry.tiles(grid[0]) * grid[0] // grid[1])[:, None, :, None]
        near = (column < first) & (column >= first - self.local)
        scores = torch.where(near, 2 * TOP, scores)
        return torch.where(column < self.sink, 4 * TOP, scores)


@frozen(eq=False)
class Tiles:
    """The tiles that a query tile may choose from, on one grid. All bool ``[B, Hq, R, C]``, scores and room broadcast
    to it.

    wanted: tiles to choose among, without those kept in any case. open: tiles whose stripes would add keys to what is
    kept in any case. scores: worth per key. room: int64 ``[B, Hq, R]``, keys that a query tile may still take.
    """

    tile_q: int
    tile_k: int
    wanted: Tensor
    open: Tensor
    scores: Tensor
    room: Tensor


def fitted(call: AttentionCall, plan: Plan, tiles: Tiles, width: int) -> tuple[Tensor, IndexLists]:
    """Those of the wanted tiles that fit, bool ``[B, Hq, R, C]``, and of the plan's stripes, by query tile.

    Tiles and columns go in order of their worth per key (of equal ones tiles first, then the nearer), as long as they
    fit. A tile costs its keys. A stripe costs one, in a tile that is kept nothing; it is then left out of the lists.
    What a tile would not fit into goes to the next columns. width: a bound on a query tile's room, known on the host.
    """
    mask, geometry = plan.mask, call.geometry
    rows, columns = tiles.wanted.shape[2:]
    per = mask.group_rows // tiles.tile_q
    groups = geometry.tile_rows(mask.group_rows)
    slots = min(per, rows)
    largest = geometry.batch * max(geometry.kv_len, slots * max(columns, geometry.kv_len // BLOCKS), BLOCKS * columns)
    step = max(1, ENTRIES // largest)
    heads, some = max(1, step // groups), min(step, groups)
    maker = _Maker(call, plan, tiles, per, slots, min(width, geometry.kv_len))
    kept, lists = [], []
    for head in range(0, geometry.heads, heads):
        here = slice(head, min(head + heads, geometry.heads))
        parts = [maker.part(here, range(first, min(first + some, groups))) for first in range(0, groups, some)]
        kept.append(maker.by_row(torch.cat([part[0] for part in parts], 2)))
        joined = IndexLists.joined([part[1] for part in parts], 2)
        counts, offsets = (maker.by_row(x[..., None])[..., 0] for x in (joined.counts, joined.offsets))
        lists.append(IndexLists(counts, offsets, joined.indices, sound=joined.sound))
    return torch.cat(kept, 1), IndexLists.joined(lists, 1)


@frozen(eq=False)
class _Maker:
    """Works on some heads and groups at a time. Each group has `slots` places for its query tiles."""

    call: AttentionCall
    plan: Plan
    tiles: Tiles
    per: int
    slots: int
    width: int

    def part(self, heads: slice, groups: range) -> tuple[Tensor, IndexLists]:
        """Tiles kept, ``[B, h, n * slots, C]``, and stripes, lists of the same places."""
        tiles, tile_k = self.tiles, self.tiles.tile_k
        order = _Order.of(self.call, self.plan, heads, groups, tile_k, tiles.scores.dtype)
        index, real = self._places(groups)

        def placed(x: Tensor) -> Tensor:
            """``[B, h, n, slots, *]`` of x ``[B, Hq, R, *]``."""
            x = x[:, heads] if x.shape[1] > 1 else x.expand(-1, heads.stop - heads.start, *x.shape[2:])
            at = index.view(index.shape[0], 1, -1, *[1] * (x.dim() - 3))
            picked: Tensor = torch.take_along_dim(x, at, 2).unflatten(2, (len(groups), -1))
            return picked

        wanted, free = placed(tiles.wanted) & real[..., None], placed(tiles.open) & real[..., None]
        room = torch.where(real, placed(tiles.room).clamp(min=0), 0)
        worth, ranked = descending(placed(tiles.scores.expand(tiles.wanted.shape)), wanted)
        table = order.table(free)
        number = _tiles_that_fit(order, table, worth, ranked, wanted, room, tile_k)
        kept = first_of(ranked, number, wanted)
        left = order.table(free & ~kept)
        stripes = self._stripes(order, left, left.first(room - number * tile_k), groups)
        return kept.flatten(2, 3), stripes

    def _stripes(self, order: _Order, left: _Table, bound: Tensor, groups: range) -> IndexLists:
        """Lists of the columns that stand before `bound` ``[B, h, n, slots]`` in the order, where tiles are open."""
        kv_len, width = order.rank.shape[-1], max(1, self.width)
        batch, heads, count, slots = bound.shape
        some = max(1, CELLS // (batch * heads * count * kv_len))
        counts, offsets, indices, length = [], [], [], 0
        for first in range(0, slots, some):
            part = slice(first, first + some)
            free = left.open[..., part, :].repeat_interleave(self.tiles.tile_k, dim=-1)[..., :kv_len]
            keep = (order.rank[..., None, :] < bound[..., part, None]) & free
            lists = IndexLists.from_map(keep.flatten(2, 3))
            index = lists.padded(width)[1].to(torch.int32)
            here = (
                torch.arange(lists.counts.numel(), device=index.device).view(batch, heads, count, -1) * width + length
            )
            counts.append(lists.counts.unflatten(2, (count, -1)))
            offsets.append(here)
            indices.append(index.flatten())
            length += index.numel()
        made = (torch.cat(counts, 3).flatten(2), torch.cat(offsets, 3).flatten(2), torch.cat(indices))
        return IndexLists(*made, sound=True)

    def _first(self, groups: range) -> tuple[Tensor, Tensor]:
        """int64 ``[B, n]``: index of each group on its row's grid, and of the first query tile of it in the call."""
        geometry, tile_q = self.call.geometry, self.tiles.tile_q
        number = geometry.tiles(self.per * tile_q)[:, groups.start : groups.stop]
        return number, (number * self.per - geometry.first_tile(tile_q)[:, None]).clamp(min=0)

    def _places(self, groups: range) -> tuple[Tensor, Tensor]:
        """The query tile of each place, int64 ``[B, n * slots]``; and bool ``[B, 1, n, slots]``, which hold one."""
        geometry, tile_q = self.call.geometry, self.tiles.tile_q
        number, first = self._first(groups)
        row = first[..., None] + torch.arange(self.slots, device=geometry.device)
        group = (row + geometry.first_tile(tile_q)[:, None, None]) // self.per
        rows = geometry.tile_rows(tile_q)
        real = (row < rows) & (group == number[..., None])
        return row.clamp(max=rows - 1).flatten(1), real[:, None]

    def by_row(self, x: Tensor) -> Tensor:
        """``[B, h, R, *]`` of x ``[B, h, G * slots, *]``, the places of all groups."""
        geometry, tile_q = self.call.geometry, self.tiles.tile_q
        groups = range(x.shape[2] // self.slots)
        tile = geometry.tiles(tile_q)
        group = geometry.tile_at(tile * tile_q, self.per * tile_q)
        first = torch.gather(self._first(groups)[1], 1, group)
        row = torch.arange(tile.shape[1], device=tile.device)
        return torch.take_along_dim(x, (group * self.slots + row - first)[:, None, :, None], 2)


@frozen(eq=False)
class _Order:
    """The columns of some heads and groups in descending order of worth, in blocks of `size` neighbours.

    worth: ``[B, h, n, M]``, -inf behind the last stripe. tile: int64 like it, key tile of each. listed: bool like it.
    rank: int64 ``[B, h, n, Nkv]``, place of each key; that of keys without a stripe is behind all others.
    counts: float32 ``[B, h, n, C, blocks]``, stripes of each key tile in each block. M: Nkv up to whole blocks.
    """

    worth: Tensor
    tile: Tensor
    listed: Tensor
    rank: Tensor
    counts: Tensor
    size: int

    @classmethod
    def of(
        cls, call: AttentionCall, plan: Plan, heads: slice, groups: range, tile_k: int, dtype: torch.dtype
    ) -> _Order:
        """Sorts the stripes of the plan's mask."""
        geometry, mask = call.geometry, plan.mask
        keep = stripe_map(mask, heads, groups)
        number = geometry.tiles(mask.group_rows)[:, groups.start : groups.stop]
        scores = column_worth(plan, call, number * mask.group_rows, heads).to(dtype).expand(keep.shape)
        worth, column = descending(scores, keep)
        rank = torch.empty_like(column)
        place = torch.arange(column.shape[-1], device=column.device).expand_as(column)
        rank.scatter_(-1, column, place)
        size = -(-geometry.kv_len // BLOCKS)
        spare = -geometry.kv_len % size
        rank = torch.where(keep, rank, geometry.kv_len + spare)
        listed = functional.pad(worth > -torch.inf, (0, spare))
        tile = functional.pad(column // tile_k, (0, spare))
        columns, blocks = geometry.tile_columns(tile_k), listed.shape[-1] // size
        block = torch.arange(listed.shape[-1], device=column.device) // size
        counts = listed.new_zeros(*keep.shape[:3], columns * blocks, dtype=torch.float32)
        counts.scatter_add_(-1, tile * blocks + block, listed.float())
        worth = functional.pad(worth, (0, spare), value=-torch.inf)
        return cls(worth, tile, listed, rank, counts.unflatten(-1, (columns, blocks)), size)

    def table(self, free: Tensor) -> _Table:
        """Numbers of stripes before each block, of open tiles, bool ``[B, h, n, slots, C]``."""
        return _Table(self, free, functional.pad((free.float() @ self.counts).cumsum(-1), (1, 0)).to(torch.int64))


@frozen(eq=False)
class _Table:
    """Stripes in the open tiles of each query tile. before: int64 ``[B, h, n, slots, blocks + 1]``."""

    order: _Order
    open: Tensor
    before: Tensor

    def count(self, place: Tensor) -> Tensor:
        """int64 ``[B, h, n, slots]``: those that stand before `place`, alike, in the order."""
        block = place // self.order.size
        inner = torch.arange(self.order.size, device=place.device) < (place % self.order.size)[..., None]
        whole = torch.gather(self.before, -1, block[..., None])[..., 0]
        return whole + (self._members(block) & inner).sum(-1)

    def first(self, number: Tensor) -> Tensor:
        """int64 ``[B, h, n, slots]``: a place before which `number` stand, or all that there are."""
        last = self.before.shape[-1] - 2
        whole = torch.searchsorted(self.before[..., 1:].contiguous(), number[..., None].contiguous())
        block = whole[..., 0].clamp(max=last)
        spare = number - torch.gather(self.before, -1, block[..., None])[..., 0]
        inner = (self._members(block).cumsum(-1) <= spare[..., None]).sum(-1)
        return block * self.order.size + inner

    def _members(self, block: Tensor) -> Tensor:
        """bool ``[B, h, n, slots, size]``: of a block of each query tile which columns are stripes in open tiles."""
        size, order = self.order.size, self.order
        at = block.clamp(max=self.before.shape[-1] - 2)[..., None] * size + torch.arange(size, device=block.device)
        tile, listed = (torch.gather(x, -1, at.flatten(3)).view(at.shape) for x in (order.tile, order.listed))
        return torch.gather(self.open, -1, tile) & listed


def _tiles_that_fit(
    order: _Order, table: _Table, worth: Tensor, ranked: Tensor, wanted: Tensor, room: Tensor, tile_k: int
) -> Tensor:
    """int64 ``[B, h, n, slots]``: how many tiles are kept, of their order `ranked`, int64 ``[B, h, n, slots, C]``.

    The most before which, with the columns of higher worth, everything fits; more where all stripes fit as well.
    """
    number = wanted.sum(-1)
    place = torch.searchsorted(-order.worth, -worth.flatten(3).contiguous()).view(worth.shape)
    low, high = torch.zeros_like(number), number
    for _ in range(worth.shape[-1].bit_length()):
        middle = (low + high + 1) // 2
        at = torch.gather(place, -1, (middle - 1).clamp(min=0)[..., None]).squeeze(-1)
        fits = middle * tile_k + table.count(at) <= room
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    inside = table.open * order.counts.sum(-1)[..., None, :]
    saved = torch.gather(inside, -1, ranked).to(torch.int64)
    whole = table.before[..., -1:] + (tile_k - saved).cumsum(-1)
    fits = (whole <= room[..., None]) & (torch.arange(1, worth.shape[-1] + 1, device=worth.device) <= number[..., None])
    return torch.maximum(low, fits.sum(-1))


def stripe_map(mask: SparseMask, heads: slice, groups: range) -> Tensor:
    """bool ``[B, h, n, Nkv]`` of some heads and groups."""
    lists, part = mask.stripes, slice(groups.start, groups.stop)
    if lists is None:
        return mask.stripe_map()[:, heads, part]
    return lists[:, heads, part].to_map(mask.geometry.kv_len, mask.stripe_width)
