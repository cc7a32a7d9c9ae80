"""The difference of two masks, exact for any grids and any mixture of tiles and stripes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import evolve
from torch import Tensor
from torch.nn import functional

from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.mask.union import stripes_on, tiles_on

if TYPE_CHECKING:
    from sparseprefill.mask.mask import SparseMask


def difference(a: SparseMask, b: SparseMask) -> SparseMask:
    """Pairs of `a` that `b` does not hold.

    A tile of `a` that a stripe of `b` runs through is broken up: what is left of it becomes stripes.
    """
    if not (a.has_tiles or a.stripes is not None) or not (b.has_tiles or b.stripes is not None):
        return a
    tile_q, tile_k = math.gcd(a.tile_q, b.tile_q), math.gcd(a.tile_k, b.tile_k)
    keep = tiles_on(a, tile_q, tile_k) & ~tiles_on(b, tile_q, tile_k)
    grid = evolve(a, tile_q=tile_q, tile_k=tile_k, tiles=None, group=1, stripes=None)
    if a.stripes is None and b.stripes is None:
        return evolve(grid, tiles=_mapped(grid, keep))
    rows = _rows(a, b, tile_q)
    left = stripes_on(a, rows)
    if b.has_tiles:
        left = left & ~_columns(tiles_on(b, rows, tile_k), tile_k, left.shape[3])
    if b.stripes is not None:
        cut = stripes_on(b, rows)
        if a.has_tiles:  # then rows == tile_q, so `keep` and `cut` have the same rows
            broken = keep & _any_column(cut, tile_k)
            keep = keep & ~broken
            left = left | _columns(broken, tile_k, left.shape[3])
        left = left & ~cut
    return evolve(grid, tiles=_mapped(grid, keep), group=rows // tile_q, stripes=IndexLists.from_map(left))


def _mapped(grid: SparseMask, keep: Tensor) -> TileMap:
    return TileMap(geometry=grid.geometry, tile_q=grid.tile_q, tile_k=grid.tile_k, keep=keep)


def _rows(a: SparseMask, b: SparseMask, tile_q: int) -> int:
    """Query rows per group of the stripes left: the most that serve every side."""
    if a.has_tiles and b.stripes is not None:
        return tile_q
    sizes = [mask.group_rows for mask in (a, b) if mask.stripes is not None]
    return math.gcd(*sizes, b.tile_q) if b.has_tiles else math.gcd(*sizes)


def _columns(tiles: Tensor, tile_k: int, kv_len: int) -> Tensor:
    return tiles.repeat_interleave(tile_k, dim=-1)[..., :kv_len]


def _any_column(stripes: Tensor, tile_k: int) -> Tensor:
    padded = functional.pad(stripes, (0, -stripes.shape[-1] % tile_k))
    found: Tensor = padded.unflatten(-1, (-1, tile_k)).any(-1)
    return found
