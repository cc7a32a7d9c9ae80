"""What refiners share that take pairs away: what there is to choose from, and the plan of what was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.errors import ParameterError
from sparseprefill.mask.geometry import diagonal_map, reachable_map
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.tile_map import TileMap

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.mask.lists import IndexLists
    from sparseprefill.mask.priority import Priority
    from sparseprefill.plan import Plan


@frozen(eq=False)
class Choice:
    """The tiles of a plan on the grid that its mask and its carry share. Bool maps, broadcastable to ``[B, Hq, R, C]``.

    reach: tiles with an allowed pair. tiles: those that the plan holds. own: the diagonal ones, which stay or are
    added. free: those in reach that are no diagonal ones; own and free are without the carry's region. taken: int64
    ``[B, h, R]``, tiles of that region.
    """

    grid: tuple[int, int]
    reach: Tensor
    tiles: Tensor
    own: Tensor
    free: Tensor
    taken: Tensor | int

    @classmethod
    def of(cls, call: AttentionCall, plan: Plan) -> Choice:
        """What a plan leaves to choose from."""
        geometry, grid = call.geometry, plan.common_grid()
        reach = reachable_map(geometry, *grid)[:, None]
        own = diagonal_map(geometry, *grid)[:, None] & reach
        free, tiles = reach & ~own, plan.mask.tiles_on(*grid)
        if plan.carry is None:
            return cls(grid, reach, tiles, own, free, 0)
        region = plan.carry.region.tiles_on(*grid)
        return cls(grid, reach, tiles, own & ~region, free & ~region, region.sum(-1))

    def ends(self, geometry: Geometry, sink: int, local: int) -> Tensor:
        """bool ``[B, Hq, R, C]``: those of the plan's tiles that are diagonal, or of the first `sink`, or of the
        `local` before the diagonal; a diagonal tile that the plan does not hold is added."""
        column = torch.arange(self.reach.shape[-1], device=geometry.device)
        first = torch.div(geometry.tiles(self.grid[0]) * self.grid[0], self.grid[1], rounding_mode="floor")
        behind = first[:, None, :, None]
        return self.tiles & ((column < sink) | ((column >= behind - local) & (column < behind))) | self.own

    def narrowed(
        self, plan: Plan, keep: Tensor, stripes: IndexLists | None, group: int = 1, *, disjoint: bool = True
    ) -> Plan:
        """The plan with these tiles ``[B, Hq, R, C]`` and stripes, for groups of so many query tiles, and no others.

        disjoint: no stripe lies in a tile that is kept.
        """
        geometry = plan.mask.geometry
        chosen = TileMap(geometry=geometry, tile_q=self.grid[0], tile_k=self.grid[1], keep=keep)
        narrow = SparseMask(geometry, *self.grid, chosen, group, stripes, disjoint=disjoint)
        if plan.carry is not None and plan.carry.region.stripes is not None:
            narrow = narrow - plan.carry.region  # a diagonal tile that was added may hold its stripes
        return evolve(plan, mask=narrow)


def scores_of(plan: Plan, refiner: object, instead: str) -> Priority:
    """The scores of a plan; ParameterError, with what would do `instead`, where its estimator left none."""
    if plan.priority is None:
        remedy = f"put it after an estimator that provides scores (every method except dense), or {instead}"
        raise ParameterError(f"{type(refiner).__name__} needs scores, but the plan's priority is None: {remedy}")
    return plan.priority
