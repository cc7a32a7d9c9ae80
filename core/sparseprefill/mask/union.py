"""The union of two masks, and one mask's tiles and stripes on another grid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import evolve
from torch import Tensor

from sparseprefill.mask.grid import regrid
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.tile_map import TileMap

if TYPE_CHECKING:
    from sparseprefill.mask.mask import SparseMask


def union(a: SparseMask, b: SparseMask) -> SparseMask:
    """Tiles meet as maps, which are not turned into lists yet; stripes stay lists where only one side has them."""
    if not a.has_tiles and a.stripes is None:
        return b
    if not b.has_tiles and b.stripes is None:
        return a
    for tiles, stripes in ((a, b), (b, a)):
        if tiles.stripes is None and not stripes.has_tiles and stripes.group_rows % tiles.tile_q == 0:
            group = stripes.group_rows // tiles.tile_q
            return evolve(tiles, group=group, stripes=stripes.stripes, disjoint=False)
    tile_q, tile_k = math.gcd(a.tile_q, b.tile_q), math.gcd(a.tile_k, b.tile_k)
    maps = [_on(mask, tile_q, tile_k) for mask in (a, b) if mask.has_tiles]
    tiles_of_both = (maps[0] | maps[-1] if len(maps) == 2 else maps[0]) if maps else None
    mask = evolve(a, tile_q=tile_q, tile_k=tile_k, tiles=tiles_of_both, group=1, stripes=None, disjoint=False)
    if a.stripes is not None and b.stripes is not None:
        group_rows = math.gcd(a.group_rows, b.group_rows)
        keep = stripes_on(a, group_rows) | stripes_on(b, group_rows)
        return evolve(mask, group=group_rows // tile_q, stripes=IndexLists.from_map(keep))
    striped = b if a.stripes is None else a
    return evolve(mask, group=striped.group_rows // tile_q, stripes=striped.stripes)


def _on(mask: SparseMask, tile_q: int, tile_k: int) -> TileMap:
    """The mask's tiles on a grid that divides its own."""
    own = mask.as_map()
    if (own.tile_q, own.tile_k) == (tile_q, tile_k):
        return own
    return TileMap(
        geometry=mask.geometry,
        tile_q=tile_q,
        tile_k=tile_k,
        keep=own.resolved,
        per_row=mask.tile_q // tile_q,
        per_column=mask.tile_k // tile_k,
    )


def tiles_on(mask: SparseMask, tile_q: int, tile_k: int) -> Tensor:
    """bool [B, Hq, R, C]: the mask's tiles on a grid that divides its own, those within reach."""
    return _on(mask, tile_q, tile_k).resolved


def stripes_on(mask: SparseMask, rows: int) -> Tensor:
    """bool [B, Hq, G, Nkv]: the mask's stripes on groups of `rows` query tokens that divide its own."""
    return regrid(mask.geometry, mask.stripe_map(), mask.group_rows, rows)
