"""How a refiner adds tiles to a plan: on the plan's grid or its own, and never in the carry's region."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.tile_map import TileMap

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.plan import Plan


def grid_of(plan: Plan, tile: int | None) -> tuple[int, int]:
    """Tokens of a query tile and of a key tile: the plan's own, or those of a square tile."""
    return (plan.mask.tile_q, plan.mask.tile_k) if tile is None else (tile, tile)


def widen(call: AttentionCall, plan: Plan, grid: tuple[int, int], **rules: Any) -> Plan:
    """The plan with the tiles that a `TileMap` of these rules has on `grid` as well."""
    tile_q, tile_k = grid
    extra = SparseMask(
        call.geometry, tile_q, tile_k, TileMap(geometry=call.geometry, tile_q=tile_q, tile_k=tile_k, **rules)
    )
    if plan.carry is not None:
        extra = extra - plan.carry.region
    return evolve(plan, mask=plan.mask | extra)
