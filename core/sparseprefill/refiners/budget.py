"""Bounds on what a query tile may cost: at least, or at most, so many key tiles, or such a share of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.errors import ParameterError, printed
from sparseprefill.mask.geometry import diagonal_map, reachable_map
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.refiners.priority import TOP, highest, priority
from sparseprefill.stages import HeadScope
from sparseprefill.validate import maybe, number, whole

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Plan


@frozen(kw_only=True)
class _Budget:
    """tiles: a number of key tiles. share: of the key tiles that a query tile can see. One of them."""

    tiles: int | None = field(default=None, validator=maybe(whole()))
    share: float | None = field(default=None, validator=maybe(number(0.0, 1.0)))

    def __attrs_post_init__(self) -> None:
        if (self.tiles is None) == (self.share is None):
            given = f"tiles={printed(self.tiles)}, share={printed(self.share)}"
            raise ParameterError(f"{type(self).__name__}({given}): pass tiles, or share, and not both")

    def _exact(self, seen: Tensor) -> Tensor:
        """The budget per query tile before rounding, of those that can see `seen` key tiles."""
        return seen.double() * self.share if self.share is not None else torch.full_like(seen, self.tiles or 0).double()


@frozen(kw_only=True)
class BudgetFloor(_Budget):
    """Each query tile keeps at least `tiles` key tiles, or a `share` of those that it can see, rounded up.

    What is missing comes by priority: that which the estimator left as a `TilePriority` in the plan's notes, else the
    nearest first. Tiles of a carry's region count; stripes do not, so that the floor holds whatever they cover.
    """

    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the tiles of highest priority."""
        geometry, grid = call.geometry, _grid(plan)
        reach = reachable_map(geometry, *grid)[:, None]
        have = plan.mask.tiles_on(*grid)
        if plan.carry is not None:
            have = have | plan.carry.region.tiles_on(*grid)
        wanted = torch.ceil(self._exact(reach.sum(-1))).to(torch.int64)
        added = highest(priority(plan, geometry, *grid), reach & ~have, wanted - have.sum(-1))
        return plan.widen(SparseMask.from_rules(call, grid, keep=added))


@frozen(kw_only=True)
class BudgetCeiling(_Budget):
    """Each query tile keeps at most `tiles` key tiles, or a `share` of those that it can see, rounded down.

    The diagonal goes first and is never dropped, not even by a budget below it. Then come the first `sink` key tiles,
    the `local` tiles before the diagonal, and the rest by priority: that which the estimator left as a `TilePriority`
    in the plan's notes, else the nearest first. A carry's region is computed already: it counts, and stays.

    A stripe costs one key, ``1 / tile_k`` of a tile. Tiles go before stripes; a group of query tiles keeps as many of
    its stripes, the nearest first, as its most loaded tile has room for.
    """

    sink: int = field(default=1, validator=whole(0))
    local: int = field(default=1, validator=whole(0))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Drops the tiles of lowest priority, and stripes that do not fit."""
        geometry, mask, grid = call.geometry, plan.mask, _grid(plan)
        budget = torch.floor(self._exact(reachable_map(geometry, *grid)[:, None].sum(-1))).to(torch.int64)
        own = (diagonal_map(geometry, *grid) & reachable_map(geometry, *grid))[:, None]
        if plan.carry is not None:
            region = plan.carry.region.tiles_on(*grid)
            own, budget = own & ~region, budget - region.sum(-1)
        scores = self._scores(priority(plan, geometry, *grid), own, geometry, grid)
        candidates = mask.tiles_on(*grid) | own
        kept = highest(scores, candidates, budget) | own
        spare = (budget - kept.sum(-1)).clamp(min=0) * grid[1]
        group = mask.group_rows // grid[0]
        stripes = None if mask.stripes is None else IndexLists.from_map(_nearest_stripes(mask, spare, grid[0]))
        tiles = TileMap(geometry=geometry, tile_q=grid[0], tile_k=grid[1], keep=kept)
        narrow = evolve(mask, tile_q=grid[0], tile_k=grid[1], tiles=tiles, group=group, stripes=stripes, disjoint=False)
        if plan.carry is not None and plan.carry.region.stripes is not None:
            narrow = narrow - plan.carry.region  # a diagonal tile that was added may hold its stripes
        return evolve(plan, mask=narrow)

    def _scores(self, scores: Tensor, own: Tensor, geometry: Geometry, grid: tuple[int, int]) -> Tensor:
        column = torch.arange(geometry.tile_columns(grid[1]), device=geometry.device)
        first = torch.div(geometry.tiles(grid[0]) * grid[0], grid[1], rounding_mode="floor")[:, None, :, None]
        near = (column < first) & (column >= first - self.local)
        scores = torch.where(near, 2 * TOP, scores)
        scores = torch.where(column < self.sink, 4 * TOP, scores)
        return torch.where(own, 8 * TOP, scores)


def _grid(plan: Plan) -> tuple[int, int]:
    """The plan's tiles; where a carry's region lies on others, the largest that divide both."""
    mask = plan.mask
    if plan.carry is None:
        return mask.tile_q, mask.tile_k
    region = plan.carry.region
    return math.gcd(mask.tile_q, region.tile_q), math.gcd(mask.tile_k, region.tile_k)


def _nearest_stripes(mask: SparseMask, spare: Tensor, tile_q: int) -> Tensor:
    """bool ``[B, Hq, G, Nkv]``: of each group's stripes the nearest, as many as each of its tiles has keys to spare."""
    geometry, rows = mask.geometry, mask.group_rows
    tile = geometry.tiles(tile_q)
    first, behind = geometry.first_position(), geometry.key_counts()
    low = torch.maximum(tile * tile_q, first[:, None].clamp(min=0))
    high = torch.minimum((tile + 1) * tile_q, torch.minimum(first + geometry.q_len, behind)[:, None])
    spare = torch.where((low < high)[:, None], spare, geometry.kv_len)
    group = torch.div(tile * tile_q, rows, rounding_mode="floor") - geometry.first_tile(rows)[:, None]
    room = torch.full((*spare.shape[:2], geometry.tile_rows(rows)), geometry.kv_len, device=spare.device)
    room.scatter_reduce_(2, group.clamp(0, room.shape[2] - 1)[:, None].expand_as(spare), spare, "amin")
    end = (geometry.tiles(rows) + 1)[:, None, :, None] * rows
    keep = mask.stripe_map() & (torch.arange(geometry.kv_len, device=spare.device) < end)
    rank = keep.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    return keep & (rank <= room[..., None])
