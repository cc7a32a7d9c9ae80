"""Bounds on what a query tile may cost: at least, or at most, so many key tiles, or such a share of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.errors import ParameterError, printed
from sparseprefill.mask.geometry import reachable_map
from sparseprefill.mask.mask import SparseMask
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.refiners.fit import Tiles, fitted
from sparseprefill.refiners.narrow import TOP, Choice, highest, tile_worth
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
        first = torch.div(geometry.tiles(grid[0]) * grid[0], grid[1], rounding_mode="floor")[:, None, :, None]
        near = (column < first) & (column >= first - self.local)
        scores = torch.where(near, 2 * TOP, scores)
        return torch.where(column < self.sink, 4 * TOP, scores)
