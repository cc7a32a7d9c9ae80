"""What a plan's masks hold of some query tiles: key tiles as a map, stripes apart, a few rows at a time."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask.lists import IndexLists

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.plan import Plan

ALIGNED = 16
"""Maps of lists are that wide, or a multiple of it."""


@frozen(eq=False)
class Held:
    """The masks of a plan, its carry's region included, on one grid. Nothing is read on the host.

    grid: tokens of a query tile and of a key tile, which divide those of all masks. map: bool ``[B, Hq, R, C]``, the
    key tiles that a mask holds as tiles; not to be written to.
    """

    geometry: Geometry
    grid: tuple[int, int]
    map: Tensor
    masks: tuple[SparseMask, ...]

    @classmethod
    def of(cls, plan: Plan, tile_k: int | None = None) -> Held:
        """On the plan's own grid, or with key tiles of fewer tokens, which divide its own."""
        masks = (plan.mask,) if plan.carry is None else (plan.mask, plan.carry.region)
        tile_q, own = plan.common_grid()
        grid = (tile_q, own if tile_k is None else tile_k)
        geometry = plan.mask.geometry
        shape = (geometry.batch, geometry.heads, geometry.tile_rows(grid[0]), geometry.tile_columns(grid[1]))
        none = torch.zeros((), dtype=torch.bool, device=geometry.device).expand(shape)
        found = [mask.tiles_on(*grid) for mask in masks if mask.has_tiles]
        return cls(geometry, grid, reduce(or_, found) if found else none, masks)

    def tiles(self, tile: Tensor) -> Tensor:
        """bool ``[B, Hq, n, C]``: the key tiles of query tiles, int64 ``[B, n]``, by their index on each row's grid."""
        index = (tile - self.geometry.first_tile(self.grid[0])[:, None]).clamp(0, self.map.shape[2] - 1)
        index = index[:, None, :, None].expand(-1, self.map.shape[1], -1, self.map.shape[3])
        return torch.gather(self.map, 2, index)

    def stripes(self, tile: Tensor, width: int) -> Tensor | None:
        """bool ``[B, Hq, n, width]``: the stripes of query tiles by position; None where no mask has any."""
        found = []
        for mask in self.masks:
            if mask.stripes is None:
                continue
            lists = mask.stripes
            group = torch.div(tile * self.grid[0], mask.group_rows, rounding_mode="floor")
            index = (group - self.geometry.first_tile(mask.group_rows)[:, None]).clamp(0, lists.shape[2] - 1)
            index = index[:, None].expand(-1, self.geometry.heads, -1)
            counts, offsets = (torch.gather(x, 2, index) for x in (lists.counts, lists.offsets))
            found.append(IndexLists(counts, offsets, lists.indices).to_map(width + -width % ALIGNED)[..., :width])
        return reduce(or_, found) if found else None
