"""SparseMask: the (query, key) pairs to compute, as key tiles and stripes per query head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.errors import MaskError
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask import density, difference
from sparseprefill.mask import grid as mask_math
from sparseprefill.mask import union as mask_union
from sparseprefill.mask.tile_map import TileMap

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.geometry import Geometry


@frozen(eq=False)
class SparseMask:
    """Per query head a union of key tiles and stripes; causality is implied and exact per token.

    Tiles of ``tile_q x tile_k`` tokens lie on each batch row's own token grid (`Geometry`). A stripe is a single key
    column, shared by `group` consecutive query tiles. A key selected twice counts once.

    tiles: lists ``[B, Hq, R]`` of key-tile indices per query tile, or None; or a `TileMap` of this grid, which becomes
    lists when `tiles` is first read.
    stripes: lists ``[B, Hq, G]`` of key positions per group of query tiles, or None.
    disjoint: the maker's word that no stripe lies in a selected tile of its group; spares executors the test.
    """

    geometry: Geometry
    tile_q: int
    tile_k: int
    _tiles: IndexLists | TileMap | None = None
    group: int = 1
    stripes: IndexLists | None = None
    disjoint: bool = field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        for name in ("tile_q", "tile_k", "group"):
            _check_size(name, getattr(self, name))
        for name, lists, rows in (
            ("tiles", self._tiles, self.geometry.tile_rows(self.tile_q)),
            ("stripes", self.stripes, self.geometry.tile_rows(self.group_rows)),
        ):
            wanted = (self.geometry.batch, self.geometry.heads, rows)
            if lists is not None and lists.shape != wanted:
                raise MaskError(f"SparseMask.{name} has lists {lists.shape}: the call needs [B, Hq, rows] = {wanted}")
        mine = (self.tile_q, self.tile_k)
        if isinstance(self._tiles, TileMap) and (self._tiles.tile_q, self._tiles.tile_k) != mine:
            theirs = (self._tiles.tile_q, self._tiles.tile_k)
            raise MaskError(f"SparseMask.tiles is a map of {theirs} tokens per tile: the mask has {mine}")

    @property
    def tiles(self) -> IndexLists | None:
        """The tiles as lists, which are made here where the mask holds a map; None for no tiles."""
        return self._tiles.lists if isinstance(self._tiles, TileMap) else self._tiles

    @property
    def has_tiles(self) -> bool:
        """Whether there are tiles, without making lists of them."""
        return self._tiles is not None

    def as_map(self) -> TileMap:
        """The tiles as a map with rules, to which more can be added before lists are made."""
        if isinstance(self._tiles, TileMap):
            return self._tiles
        keep = None if self._tiles is None else self.tile_map()
        return TileMap(geometry=self.geometry, tile_q=self.tile_q, tile_k=self.tile_k, keep=keep)

    @property
    def group_rows(self) -> int:
        """Query tokens that share one list of stripes."""
        return self.tile_q * self.group

    @classmethod
    def empty(cls, call: AttentionCall | Geometry, tile: int | tuple[int, int] = 128) -> SparseMask:
        """Nothing selected."""
        return cls(_geometry(call), *_pair(tile))

    @classmethod
    def full(cls, call: AttentionCall | Geometry, tile: int | tuple[int, int] = 128) -> SparseMask:
        """Every key that causality, window and padding allow: dense attention."""
        geometry, (tile_q, tile_k) = _geometry(call), _pair(tile)
        return cls(geometry, tile_q, tile_k, mask_math.full_lists(geometry, tile_q, tile_k))

    @classmethod
    def from_ranges(
        cls, call: AttentionCall | Geometry, first: Tensor, last: Tensor, width: int, tile: int | tuple[int, int] = 128
    ) -> SparseMask:
        """Ranges of key tiles per query tile, the same for every head; see `IndexLists.from_ranges`."""
        geometry = _geometry(call)
        return cls(geometry, *_pair(tile), IndexLists.from_ranges(first, last, geometry.heads, width))

    @classmethod
    def from_tiles(
        cls,
        call: AttentionCall | Geometry,
        keep: Tensor,
        tile: int | tuple[int, int] = 128,
        *,
        diagonal: bool = True,
    ) -> SparseMask:
        """From a bool map of tiles, broadcastable to ``[B, Hq, R, C]``.

        R = `Geometry.tile_rows(tile_q)` query tiles of the call, C = `Geometry.tile_columns(tile_k)` key tiles.
        diagonal: also keep each query tile's own diagonal tiles, so that no row is empty. Tiles that no row of theirs
        may see are left out. The map is read when the mask is used: nobody may write to it after this.
        """
        geometry, (tile_q, tile_k) = _geometry(call), _pair(tile)
        shape = (geometry.batch, geometry.heads, geometry.tile_rows(tile_q), geometry.tile_columns(tile_k))
        keep = _broadcast(keep, shape, "query tiles, key tiles")
        band = 0 if diagonal else None
        return cls(
            geometry, tile_q, tile_k, TileMap(geometry=geometry, tile_q=tile_q, tile_k=tile_k, keep=keep, band=band)
        )

    @classmethod
    def from_stripes(
        cls,
        call: AttentionCall | Geometry,
        keep: Tensor,
        group: int = 1,
        tile: int | tuple[int, int] = 128,
        *,
        diagonal: bool = True,
    ) -> SparseMask:
        """From a bool map of key positions, broadcastable to ``[B, Hq, G, Nkv]``.

        G = `Geometry.tile_rows(tile_q * group)` groups of `group` query tiles. Columns are positions on the row's
        grid. diagonal: also keep each query tile's own diagonal tiles, so that no row is empty.
        """
        geometry, (tile_q, tile_k) = _geometry(call), _pair(tile)
        _check_size("group", group)
        shape = (geometry.batch, geometry.heads, geometry.tile_rows(tile_q * group), geometry.kv_len)
        lists = IndexLists.from_map(_broadcast(keep, shape, "groups, key positions"))
        mask = cls(geometry, tile_q, tile_k, None, group, lists)
        if not diagonal:
            return mask
        return evolve(mask, tiles=TileMap(geometry=geometry, tile_q=tile_q, tile_k=tile_k, band=0))

    def __or__(self, other: SparseMask) -> SparseMask:
        """The union: commutative and idempotent in what it selects, a key selected twice counts once."""
        if not isinstance(other, SparseMask):
            return NotImplemented
        if not self.geometry.fits(other.geometry):
            mine, theirs = self.geometry.describe(), other.geometry.describe()
            raise MaskError(f"cannot unite masks of different calls: {mine} and {theirs}")
        return mask_union.union(self, other)

    def __sub__(self, other: SparseMask) -> SparseMask:
        """What this mask selects and `other` does not: how a mask is kept disjoint from a carry's region.

        Lists of tiles alone stay lists of tiles, on the largest grid that divides both. Stripes on either side are
        worked out through bool maps ``[B, Hq, G, Nkv]``, on groups of query rows that divide both grids.
        """
        if not isinstance(other, SparseMask):
            return NotImplemented
        if not self.geometry.fits(other.geometry):
            mine, theirs = self.geometry.describe(), other.geometry.describe()
            raise MaskError(f"cannot subtract masks of different calls: {mine} and {theirs}")
        return difference.difference(self, other)

    def to_dense(self, rows: Tensor | None = None) -> Tensor:
        """bool ``[B, Hq, Nq, Nkv]``, in the order of the call's tensors; `rows` picks query rows (int64 [n])."""
        return mask_math.dense(self, rows)

    @property
    def density(self) -> float:
        """Pairs selected / pairs that causality, window and padding allow, over batch and heads (host sync)."""
        return density.density(self)

    @property
    def stripe_density(self) -> float:
        """The share of the allowed pairs that stripes select, apart from tiles (host sync)."""
        return density.density(self, tiles=False)

    def tile_map(self) -> Tensor:
        """bool ``[B, Hq, R, C]``; may be what the mask itself holds, so not to be written to."""
        geometry = self.geometry
        shape = (geometry.batch, geometry.heads, geometry.tile_rows(self.tile_q), geometry.tile_columns(self.tile_k))
        if isinstance(self._tiles, TileMap):
            return self._tiles.resolved
        if self._tiles is None:
            return torch.zeros(shape, dtype=torch.bool, device=geometry.device)
        return self._tiles.to_map(shape[-1])

    def stripe_map(self) -> Tensor:
        """bool ``[B, Hq, G, Nkv]``."""
        geometry = self.geometry
        shape = (geometry.batch, geometry.heads, geometry.tile_rows(self.group_rows), geometry.kv_len)
        if self.stripes is None:
            return torch.zeros(shape, dtype=torch.bool, device=geometry.device)
        return self.stripes.to_map(geometry.kv_len)

    def head(self, batch: int, head: int) -> SparseMask:
        """The mask of one head, as a mask of batch 1 and one head (views)."""
        return mask_math.head(self, batch, head)

    def shade(self, cells: int = 64) -> Tensor:
        """float32 ``[B, Hq, cells, cells]``: share of the allowed pairs selected in each cell; NaN where none is.

        Exact for short calls; of more than 32 query rows a cell, about 16, evenly spaced, stand for it.
        """
        return mask_math.shade(self, cells)

    def picture(self, batch: int = 0, head: int = 0, cells: int = 32) -> str:
        """A text picture of one head: ``#`` all, ``+`` some, ``.`` none of the allowed pairs."""
        shades = self.head(batch, head).shade(cells)[0, 0].tolist()
        glyph = {True: "#", False: "."}
        return "\n".join(
            "".join(" " if x != x else glyph[x > 0.999] if x > 0.999 or x < 0.001 else "+" for x in row)
            for row in shades
        )

    def check(self) -> None:
        """Read every value and raise MaskError where a list is not ascending, distinct and within bounds."""
        bounds = self.geometry.tile_columns(self.tile_k)
        for name, lists, bound in (("tiles", self.tiles, bounds), ("stripes", self.stripes, self.geometry.kv_len)):
            if lists is None:
                continue
            entry, index = lists.padded(int(lists.counts.max()))
            rising = (index[..., 1:] > index[..., :-1]) | ~entry[..., 1:]
            inside = ((index >= 0) & (index < bound)) | ~entry
            if bool((lists.counts < 0).any()) or not bool(rising.all()) or not bool(inside.all()):
                raise MaskError(f"SparseMask.{name} must hold ascending, distinct indices from 0 to {bound - 1}")


def _geometry(call: AttentionCall | Geometry) -> Geometry:
    geometry = getattr(call, "geometry", call)
    if not hasattr(geometry, "tile_rows"):
        raise MaskError(f"a mask is made for an AttentionCall or its geometry, not for {type(call).__name__}")
    return geometry  # type: ignore[return-value]


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise MaskError(f"SparseMask.{name} is {value!r}: pass a positive number of tokens or tiles")


def _pair(tile: int | tuple[int, int]) -> tuple[int, int]:
    pair = tuple(tile) if isinstance(tile, tuple | list) else (tile, tile)
    if len(pair) != 2 or any(not isinstance(x, int) or isinstance(x, bool) or x < 1 for x in pair):
        raise MaskError(f"tile is {tile!r}: pass a positive number of tokens, or (query tokens, key tokens)")
    return pair[0], pair[1]


def _broadcast(keep: Tensor, shape: tuple[int, int, int, int], axes: str) -> Tensor:
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise MaskError(f"keep is {getattr(keep, 'dtype', type(keep).__name__)}: pass a bool tensor")
    try:
        return keep.expand(shape) if keep.dim() <= 4 else keep.view(shape)
    except RuntimeError:
        wanted = f"[batch, query heads, {axes}] = {shape}"
        raise MaskError(f"keep has shape {tuple(keep.shape)}: it must broadcast to {wanted}") from None
