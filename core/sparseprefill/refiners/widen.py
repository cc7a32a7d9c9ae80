"""How a refiner adds tiles to a plan: on the plan's grid or its own, and never in the carry's region."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from sparseprefill.lists import IndexLists
from sparseprefill.mask import SparseMask
from sparseprefill.mask_math import reachable_map

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.plan import Plan


def grid_of(plan: Plan, tile: int | None) -> tuple[int, int]:
    """Tokens of a query tile and of a key tile: the plan's own, or those of a square tile."""
    return (plan.mask.tile_q, plan.mask.tile_k) if tile is None else (tile, tile)


def widen(call: AttentionCall, plan: Plan, keep: Tensor, grid: tuple[int, int]) -> Plan:
    """The plan with the tiles of `keep`, bool, broadcastable to ``[B, Hq, R, C]`` on `grid`, as well."""
    mask = plan.mask
    if plan.carry is None and mask.tiles is not None and (mask.tile_q, mask.tile_k) == grid:
        keep = keep & reachable_map(call.geometry, *grid)[:, None]
        tiles = IndexLists.from_map(mask.tile_map() | keep)
        return evolve(plan, mask=evolve(mask, tiles=tiles, disjoint=False))
    extra = SparseMask.from_tiles(call, keep, grid, diagonal=False)
    if plan.carry is not None:
        extra = extra - plan.carry.region
    return evolve(plan, mask=mask | extra)
