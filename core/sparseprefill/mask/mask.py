"""SparseMask: the (query, key) pairs to compute, as key tiles and stripes per query head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor

from sparseprefill.errors import MaskError, printed
from sparseprefill.mask import count
from sparseprefill.mask.geometry import Geometry, by_block, kept_by_sizes, regrid, rows_around, same_device
from sparseprefill.mask.lists import Blocks, IndexLists, readable
from sparseprefill.mask.tile_map import Rows, TileMap, rows_map
from sparseprefill.pages import odd_layout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.export import Fa4Lists, Selection

LARGEST = 1 << 31
"""No tile, group or picture reaches it."""
MOST_CELLS = 4096
"""Cells of a picture along a side: a head then takes 64 MB."""
SHADED = 16
"""Query rows that stand for a cell of a picture."""


def _is_doubtful(mask: SparseMask) -> bool:
    return any(isinstance(lists, IndexLists) and not lists.sound for lists in (mask._tiles, mask.stripes))


@frozen(eq=False)
class SparseMask:
    """Per query head a union of key tiles and stripes; causality is implied and exact per token.

    Both are lists of key blocks on each batch row's own token grid (`Geometry`): tiles are blocks of `tile_k` tokens,
    listed for each query tile of `tile_q`; stripes are columns of `stripe_width` tokens, listed for `group` consecutive
    query tiles together. Block i of a width holds the keys ``[i * width, (i + 1) * width)``, as far as there are any. A
    key selected twice counts once.

    tiles: lists ``[B, Hq, R]`` of key-tile indices per query tile, or None; or a `TileMap` of this grid, which becomes
    lists when `tiles` is first read.
    stripes: lists ``[B, Hq, G]`` of column indices per group of query tiles, or None.
    stripe_width: tokens of a column, which divide `tile_k`; 1 for single keys.
    disjoint: the maker's word that no stripe lies in a selected tile of its group; spares executors the test.
    doubtful: whether there are lists that nobody said to be `sound`.
    """

    geometry: Geometry
    tile_q: int
    tile_k: int
    _tiles: IndexLists | TileMap | None = None
    group: int = 1
    stripes: IndexLists | None = None
    disjoint: bool = field(default=False, kw_only=True)
    stripe_width: int = field(default=1, kw_only=True)
    doubtful: bool = field(init=False, repr=False, default=Factory(_is_doubtful, takes_self=True))

    def __attrs_post_init__(self) -> None:
        for name in ("tile_q", "tile_k", "group", "stripe_width"):
            _check_size(name, getattr(self, name))
        if self.stripes is not None and self.tile_k % self.stripe_width:
            remedy = f"pass a number of tokens that divides tile_k, {self.tile_k}"
            raise MaskError(f"SparseMask.stripe_width is {self.stripe_width}: {remedy}")
        mine, tiles = (self.tile_q, self.tile_k), self._tiles
        if isinstance(tiles, TileMap) and (tiles.tile_q, tiles.tile_k) != mine:
            theirs = (tiles.tile_q, tiles.tile_k)
            raise MaskError(f"SparseMask.tiles is a map of {theirs} tokens per tile: the mask has {mine}")
        if isinstance(tiles, TileMap) and tiles.geometry is self.geometry:
            tiles = None  # of the very call
        for name, lists, tile in (("tiles", tiles, self.tile_q), ("stripes", self.stripes, self.group_rows)):
            if lists is None:
                continue
            wanted = (self.geometry.batch, self.geometry.heads, self.geometry.tile_rows(tile))
            found = lists.shape if isinstance(lists, TileMap) else tuple(lists.counts.shape)
            if found != wanted:
                raise MaskError(f"SparseMask.{name} has lists {found}: the call needs [B, Hq, rows] = {wanted}")
            if isinstance(lists, IndexLists) and not _beside(lists.counts, self.geometry):
                remedy = f"move them to the call's device {self.geometry.device}"
                raise MaskError(f"SparseMask.{name} has lists on {lists.counts.device}: {remedy}")

    @property
    def tiles(self) -> IndexLists | None:
        """The tiles as lists, which are made here where the mask holds a map; None for no tiles."""
        return self._tiles.lists if isinstance(self._tiles, TileMap) else self._tiles

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """Tiles and stripes alike, those that the mask has; makes lists of a map."""
        tiles = self.tiles
        found = () if tiles is None else (Blocks("tiles", tiles, self.tile_q, self.tile_k),)
        if self.stripes is None:
            return found
        return (*found, Blocks("stripes", self.stripes, self.group_rows, self.stripe_width))

    @property
    def has_tiles(self) -> bool:
        """True if there are tiles, without making lists of them."""
        return self._tiles is not None

    @property
    def shared(self) -> int:
        """The number of neighbouring heads that are known to have the same tiles, without reading any."""
        if isinstance(self._tiles, TileMap):
            return self._tiles.shared
        return self.geometry.heads if self._tiles is None or self._tiles.same_heads else 1

    @property
    def overlapping(self) -> bool:
        """True if a stripe may lie in a tile."""
        return self.has_tiles and self.stripes is not None and not self.disjoint

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        """Counts, offsets and indices of tiles, then of stripes, as kernels read them; all three None without any."""
        lists = self.tiles, self.stripes
        return tuple(x for one in lists for x in ((None, None, None) if one is None else one.arrays))

    @property
    def bitmap(self) -> Tensor | None:
        """uint8 ``[B, Hq, R, C]``, the tiles once more, where stripes may lie in them; else None."""
        return self.tile_map().contiguous().view(torch.uint8) if self.overlapping else None

    def listed(self) -> SparseMask:
        """The mask with lists of its tiles in the place of a map, which is let go."""
        return evolve(self, tiles=self.tiles) if isinstance(self._tiles, TileMap) else self

    def as_map(self) -> TileMap:
        """The tiles as a map with rules, to which more can be added before lists are made."""
        if isinstance(self._tiles, TileMap):
            return self._tiles
        keep = None if self._tiles is None else self._tiles.own_map(self.geometry.tile_columns(self.tile_k))
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
        return cls(geometry, tile_q, tile_k, IndexLists.full(geometry, tile_q, tile_k))

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
        """Make a mask of tiles from a bool map, broadcastable to ``[B, Hq, R, C]``.

        R = `Geometry.tile_rows(tile_q)` query tiles of the call, C = `Geometry.tile_columns(tile_k)` key tiles.
        diagonal: also keep each query tile's own diagonal tiles, so that no row is empty. Tiles that no row of theirs
        may see are left out. The map is read when the mask is used: nobody may write to it after this.
        """
        geometry, (tile_q, tile_k) = _geometry(call), _pair(tile)
        keep = _broadcast(keep, geometry, (tile_q, tile_k), "query tiles, key tiles")
        return cls.from_rules(geometry, (tile_q, tile_k), keep=keep, band=0 if diagonal else None)

    @classmethod
    def from_rules(cls, call: AttentionCall | Geometry, tile: int | tuple[int, int] = 128, **rules: Any) -> SparseMask:
        """The tiles that a `TileMap` of these rules has, such as ``sink=2`` or ``band=1``; nothing is added to them."""
        geometry, (tile_q, tile_k) = _geometry(call), _pair(tile)
        return cls(geometry, tile_q, tile_k, TileMap(geometry=geometry, tile_q=tile_q, tile_k=tile_k, **rules))

    @classmethod
    def from_stripes(
        cls,
        call: AttentionCall | Geometry,
        keep: Tensor,
        group: int = 1,
        tile: int | tuple[int, int] = 128,
        *,
        width: int = 1,
        diagonal: bool = True,
    ) -> SparseMask:
        """Make a mask of stripes from a bool map of key columns, broadcastable to ``[B, Hq, G, ceil(Nkv / width)]``.

        G = `Geometry.tile_rows(tile_q * group)` groups of `group` query tiles. width: tokens of a column, which divide
        the key tile: column i holds the positions ``[i * width, (i + 1) * width)`` of the row's grid. diagonal: also
        keep each query tile's own diagonal tiles, so that no row is empty.
        """
        geometry, (tile_q, tile_k) = _geometry(call), _pair(tile)
        for name, size in (("group", group), ("stripe_width", width)):
            _check_size(name, size)
        lists = IndexLists.from_map(_broadcast(keep, geometry, (tile_q * group, width), "groups, key columns"))
        mask = cls(geometry, tile_q, tile_k, None, group, lists, stripe_width=width)
        if not diagonal:
            return mask
        return evolve(mask, tiles=TileMap(geometry=geometry, tile_q=tile_q, tile_k=tile_k, band=0))

    def __or__(self, other: SparseMask) -> SparseMask:
        """The union: commutative and idempotent in what it selects, a key selected twice counts once."""
        if not isinstance(other, SparseMask):
            return NotImplemented
        self._check_same_call(other, "unite")
        return _union(self, other)

    def __sub__(self, other: SparseMask) -> SparseMask:
        """The part of this mask that `other` does not select: so a mask is kept disjoint from a carry's region.

        Lists of tiles alone stay lists of tiles, on the largest grid that divides both. Stripes on either side are
        worked out through bool maps of columns, ``[B, Hq, G, columns]``, whose width and groups of rows divide both.
        """
        if not isinstance(other, SparseMask):
            return NotImplemented
        self._check_same_call(other, "subtract")
        return _difference(self, other)

    def with_rules(self, rules: Sequence[TileMap], exclude: SparseMask | None = None) -> SparseMask:
        """The union with maps of this mask's grid, apart from what `exclude` selects, which is disjoint from it.

        All of them are united at once; what `exclude` selects is taken from their union.
        """
        if exclude is None and self.stripes is None and isinstance(self._tiles, TileMap):
            return evolve(self, tiles=self._tiles.joined(rules), group=1, disjoint=False)
        mask, alone = self, [one.rows_alone for one in rules]
        tiles = [one for one, rows in zip(rules, alone, strict=True) if rows is None]
        if tiles:
            extra = SparseMask(self.geometry, self.tile_q, self.tile_k, reduce(or_, tiles))
            mask = mask | (extra if exclude is None else extra - exclude)
        for rows in alone:
            if rows is not None:
                mask = mask.with_dense_rows(rows, exclude)
        return mask

    def with_dense_rows(self, rows: Rows, exclude: SparseMask | None = None) -> SparseMask:
        """The mask with every key for some query tiles, apart from what `exclude` selects, which is disjoint from it.

        rows: a range of query tiles of this mask's grid. Cheaper than the union with a mask of these rows: a map gets a
        rule, lists get a few rows, and where no stripe lies in a tile, that stays so: stripes go from the rows.
        """
        g, tiles, mine = self.geometry, self._tiles, (self.tile_q, self.tile_k)
        every = TileMap(geometry=g, tile_q=self.tile_q, tile_k=self.tile_k, dense=rows)
        if exclude is not None and (exclude.stripes is not None or (exclude.tile_q, exclude.tile_k) != mine):
            return self | (SparseMask(g, self.tile_q, self.tile_k, every, disjoint=True) - exclude)
        group, stripes = 1 if self.disjoint else self.group, self.stripes
        if self.disjoint and stripes is not None:
            groups = None if self.group == 1 else _groups_of(g, self.tile_q, self.group_rows)
            stripes = stripes.of_rows(groups, without=rows_map(g, self.tile_q, rows))
        if exclude is not None:
            left = exclude.as_map().left_of(rows)
            return evolve(self, tiles=left if tiles is None else self.as_map() | left, group=group, stripes=stripes)
        if isinstance(tiles, TileMap):
            return evolve(self, tiles=tiles | every, group=group, stripes=stripes)
        if tiles is None:
            tiles = IndexLists.empty(g.batch, g.heads, g.tile_rows(self.tile_q), g.device)
            tiles = evolve(tiles, same_heads=True)
        filled = tiles.filled(rows_map(g, self.tile_q, rows), g, self.tile_q, self.tile_k)
        return evolve(self, tiles=filled, group=group, stripes=stripes)

    def regrouped(self, group: int) -> SparseMask:
        """The mask with stripes for groups of fewer query tiles, which divide its own; lists stay in their storage."""
        stripes = self.stripes
        if group == self.group:
            return self
        if self.group % group:
            raise MaskError(f"group is {group}: pass a divisor of {self.group}, the mask's own")
        if stripes is None:
            return evolve(self, group=group)
        index = _groups_of(self.geometry, self.tile_q * group, self.group_rows)
        return evolve(self, group=group, stripes=stripes.of_rows(index))

    def _check_same_call(self, other: SparseMask, verb: str) -> None:
        if not self.geometry.fits(other.geometry):
            mine, theirs = self.geometry.describe(), other.geometry.describe()
            raise MaskError(f"cannot {verb} masks of different calls: {mine} and {theirs}")

    def to_dense(self, rows: Tensor | Sequence[int] | None = None) -> Tensor:
        """bool ``[B, Hq, Nq, Nkv]``, in the order of the call's tensors; `rows` picks query rows (int64 [n]).

        Raises MaskError for rows that are no indices of query rows; of rows on a device no value is read.
        """
        geometry = self.geometry
        rows = None if rows is None else _query_rows(rows, geometry)
        return self._chosen(rows) & geometry.visible(rows)[:, None]

    def _chosen(self, rows: Tensor | None) -> Tensor:
        """`to_dense` without regard to what a row may see."""
        geometry = self.geometry
        query, key = geometry.query_positions(), geometry.key_positions()
        if rows is not None:
            query = query[:, rows]
        shape = (geometry.batch, geometry.heads, query.shape[1], geometry.kv_len)
        selected = torch.zeros(shape, dtype=torch.bool, device=geometry.device)
        for keep, size, width in (
            (self.tile_map() if self.has_tiles else None, self.tile_q, self.tile_k),
            (None if self.stripes is None else self.stripe_map(self.stripe_width), self.group_rows, self.stripe_width),
        ):
            if keep is not None:
                column = key // width
                at = column.clamp(min=0)[:, None, None]
                selected |= torch.take_along_dim(rows_around(geometry, keep, query, size), at, 3)
        return selected

    def pairs(self) -> Tensor:
        """int64 ``[B, Hq]`` on the mask's device: allowed pairs selected. Nothing is read on the host but on a CPU,
        where lists that are no ascending, distinct indices are refused: MaskError."""
        return self.pairs_by_tile().sum(-1)

    def pairs_by_tile(self) -> Tensor:
        """int64 ``[B, Hq, n]``: what `pairs` adds up, of each query tile where kernels count."""
        if self.doubtful:
            _ = self.looked_at
        sizes = (self.tile_q, self.tile_k, self.group, self.stripe_width)
        return count.by_tile(self.geometry, sizes, self.tiles, self.stripes, disjoint=self.disjoint)

    @property
    def density(self) -> float:
        """Pairs selected / pairs that causality, window and padding allow, over batch and heads (host sync)."""
        return count.share(self.pairs(), self.geometry)

    @property
    def stripe_density(self) -> float:
        """The share of the allowed pairs that stripes select, apart from tiles (host sync)."""
        return count.share(evolve(self, tiles=None).pairs(), self.geometry)

    @property
    def nbytes(self) -> int:
        """Memory that keeping the lists would hold, in bytes; makes lists of a map."""
        return sum(one.lists.nbytes for one in self.blocks)

    def tile_map(self) -> Tensor:
        """bool ``[B, Hq, R, C]``; may be what the mask itself holds, so not to be written to."""
        geometry = self.geometry
        if isinstance(self._tiles, TileMap):
            return self._tiles.resolved
        if self._tiles is None:
            return torch.zeros(geometry.map_shape(self.tile_q, self.tile_k), dtype=torch.bool, device=geometry.device)
        return self._tiles.to_map(geometry.tile_columns(self.tile_k))

    def stripe_map(self, width: int = 1) -> Tensor:
        """bool ``[B, Hq, G, ceil(Nkv / width)]``: the stripes as columns of `width` tokens, which divide their own."""
        geometry = self.geometry
        if self.stripes is None:
            shape = geometry.map_shape(self.group_rows, width)
            return torch.zeros(shape, dtype=torch.bool, device=geometry.device)
        return self.stripes.to_map(geometry.tile_columns(width), self.stripe_width // width)

    def tiles_on(self, tile_q: int, tile_k: int) -> Tensor:
        """bool ``[B, Hq, R, C]``: the tiles on a grid that divides the mask's own, those within reach."""
        return _map_on(self, tile_q, tile_k).resolved

    def stripes_on(self, rows: int, width: int = 1) -> Tensor:
        """bool ``[B, Hq, G, ceil(Nkv / width)]``: the stripes on groups of `rows` query tokens, as columns of `width`
        tokens; both divide the mask's own."""
        return regrid(self.geometry, self.stripe_map(width), self.group_rows, rows)

    def with_stripe_width(self, width: int) -> SparseMask:
        """The mask with stripes as columns of fewer tokens, which divide their own."""
        if width == self.stripe_width:
            return self
        if self.stripes is None:
            return evolve(self, stripe_width=width)
        if self.stripe_width % width:
            raise MaskError(f"width is {width}: pass a divisor of {self.stripe_width}, the mask's own")
        lists = self.stripes.split(self.stripe_width // width, self.geometry.tile_columns(width))
        return evolve(self, stripes=lists, stripe_width=width)

    def head(self, batch: int, head: int) -> SparseMask:
        """The mask of one head, as a mask of batch 1 and one head (views)."""
        g = self.geometry
        for name, index, size in (("batch", batch, g.batch), ("head", head, g.heads)):
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < size:
                raise MaskError(f"{name} is {printed(index)}: pass an integer from 0 to {size - 1}")
        one = slice(batch, batch + 1)
        starts = None if g.starts is None else g.starts[one]
        lengths = None if g.lengths is None else g.lengths[one]
        own = (one, slice(head, head + 1))
        tiles = None if self.tiles is None else self.tiles[own]
        stripes = None if self.stripes is None else self.stripes[own]
        geometry = evolve(g, batch=1, heads=1, starts=starts, lengths=lengths)
        return evolve(self, geometry=geometry, tiles=tiles, stripes=stripes)

    def shade(self, cells: int = 64) -> Tensor:
        """float32 ``[B, Hq, cells, cells]``: share of the allowed pairs selected in each cell; NaN where none is.

        Exact for short calls; of more than 32 query rows a cell, about 16, evenly spaced, stand for it. cells: up to
        4096; MaskError for another number.
        """
        if not _is_size(cells) or cells > MOST_CELLS:
            raise MaskError(f"cells is {printed(cells)}: pass a positive number of cells, up to {MOST_CELLS}")
        g = self.geometry
        selected, allowed = (
            torch.zeros(g.batch, heads, cells, cells, dtype=torch.float32, device=g.device) for heads in (g.heads, 1)
        )
        column = torch.arange(g.kv_len, device=g.device) * cells // g.kv_len
        for rows in _row_chunks(g, max(1, g.q_len // (cells * SHADED))):
            row = rows * cells // g.q_len
            seen = g.visible(rows)[:, None]
            for total, keep in ((selected, self._chosen(rows) & seen), (allowed, seen)):
                by_column = total.new_zeros(*keep.shape[:3], cells)
                by_column.index_add_(3, column, keep.float())
                total.index_add_(2, row, by_column)
        return selected / allowed  # nan where nothing is allowed, and so nothing selected

    def picture(self, batch: int = 0, head: int = 0, cells: int = 32) -> str:
        """A text picture of one head: ``#`` all, ``+`` some, ``.`` none of the allowed pairs."""
        shades = self.head(batch, head).shade(cells).view(cells, cells).tolist()
        glyph = {True: "#", False: "."}
        return "\n".join(
            "".join(" " if x != x else glyph[x > 0.999] if x > 0.999 or x < 0.001 else "+" for x in row)
            for row in shades
        )

    def to_flex(self, block: int | tuple[int, int] = 128) -> BlockMask:
        """The mask as a BlockMask of PyTorch's FlexAttention: tiles and stripes, causality, window and padding.

        Nothing is lost: pairs of partial blocks are decided one by one by its ``mask_mod``. Its blocks lie on the
        tensors' indices, and full ones are told from partial ones. Heads are one where all have the same lists. It
        holds int32 ``[B, Hq, R, C]`` several times over. Nothing is read on the host. Scale, softcap and sinks belong
        to the call: pass ``scale``, or a ``score_mod``, to FlexAttention.

        block: tokens of a block, or (query tokens, key tokens). A stripe makes its whole block partial, and a partial
        block costs as much as a full one. Raises MaskError for a size that is none.
        """
        from sparseprefill.mask import export

        return export.to_flex(self._selection(), _pair(block, "block"))

    def to_fa4(self, block: int | tuple[int, int] | None = None) -> Fa4Lists:
        """The mask's tiles as the block lists of flash-attn-4: counts and indices of partial blocks, and of full ones.

        Its ``mask_mod`` must do what the lists cannot: causality, and the window, inside partial blocks. Rows of right
        padding may get any output; real ones get what our executors give. Nothing is read on the host. Lists are int32
        ``[B, Hq, R, C]``, of one head where all have the same.

        block: tokens of a block, or (query tokens, key tokens), which divide the mask's tiles; None for the tiles.
        Raises MaskError for what the lists cannot carry: stripes, left padding, an offset inside a block.
        """
        from sparseprefill.mask import export

        return export.to_fa4(self._selection(), None if block is None else _pair(block, "block"))

    def _selection(self) -> Selection:
        from sparseprefill.mask.export import Selection

        keep, heads = None, self.geometry.heads
        if self.has_tiles:
            tiles = self.as_map()
            keep = tiles.by_group(heads) if tiles.shared == heads else tiles.resolved
        of = (self.geometry, self.tile_q, self.tile_k, self.group, self.stripe_width)
        return Selection(*of, keep, self.stripes)

    def check(self) -> None:
        """Read every value and raise MaskError where a list is not ascending, distinct and within bounds.

        A list that reaches beyond the indices in memory is named by its place.
        """
        for name, lists, _, width in self.blocks:
            bound = self.geometry.tile_columns(width)
            _check_counts(name, lists, bound)
            wrong = lists.distinct.disordered(bound)
            if bool(wrong.any()):
                batch, head, row = wrong.nonzero()[0].tolist()
                shown = f"the list of batch row {batch}, head {head}, row {row} is"
                raise MaskError(f"{_wanted(name, bound)}: {shown} {printed(lists.row(batch, head, row).tolist())}")

    @cached_property
    def looked_at(self) -> bool:
        """True. Looks at lists that need not be `sound`, once, where they are `readable`: MaskError as of `check`."""
        if readable(self.geometry.device):
            self.check()
        return True


def _check_counts(name: str, lists: IndexLists, bound: int) -> None:
    """Raise unless every list has a possible length and lies within the indices, before any of them is read."""
    counts, offsets, held = lists.counts, lists.offsets, lists.indices.numel()
    if bool(((counts < 0) | (counts > bound)).any()):
        raise MaskError(_wanted(name, bound))
    outside = ((offsets < 0) | (offsets > held - counts)) & (counts > 0)
    if bool(outside.any()):
        batch, head, row = outside.nonzero()[0].tolist()
        offset, count = int(offsets[batch, head, row]), int(counts[batch, head, row])
        raise MaskError(
            f"SparseMask.{name}: the list of batch row {batch}, head {head}, row {row} has {count} entries from offset "
            f"{offset}: it must lie within the {held} indices"
        )


def _wanted(name: str, bound: int) -> str:
    return f"SparseMask.{name} must hold ascending, distinct indices from 0 to {bound - 1}"


def _geometry(call: AttentionCall | Geometry) -> Geometry:
    geometry = getattr(call, "geometry", call)
    if not hasattr(geometry, "tile_rows"):
        raise MaskError(f"a mask is made for an AttentionCall or its geometry, not for {type(call).__name__}")
    return geometry  # type: ignore[return-value]


def _check_size(name: str, value: object) -> None:
    if not _is_size(value):
        raise MaskError(f"SparseMask.{name} is {printed(value)}: pass a positive number of tokens or tiles, below 2^31")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < LARGEST


def _query_rows(rows: Tensor | Sequence[int], geometry: Geometry) -> Tensor:
    """Indices of query rows, on the geometry's device."""
    last = geometry.q_len - 1
    remedy = f"pass indices of query rows, integers from 0 to {last}"
    try:
        index = rows if isinstance(rows, Tensor) else torch.as_tensor(rows, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise MaskError(f"rows is {printed(rows)}: {remedy}") from None
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        raise MaskError(f"rows is {index.dtype} of shape {tuple(index.shape)}: {remedy}")
    if index.device.type == "cpu" and bool(((index < -geometry.q_len) | (index > last)).any()):
        raise MaskError(f"rows is {index.tolist()}: {remedy}")
    return index.to(geometry.device)


def _pair(tile: int | tuple[int, int], name: str = "tile") -> tuple[int, int]:
    pair = tuple(tile) if isinstance(tile, tuple | list) else (tile, tile)
    if len(pair) != 2 or not all(map(_is_size, pair)):
        remedy = "pass a positive number of tokens below 2^31, or (query tokens, key tokens)"
        raise MaskError(f"{name} is {printed(tile)}: {remedy}")
    return pair[0], pair[1]


def _beside(x: Tensor, geometry: Geometry) -> bool:
    return x.device == geometry.device or same_device(x.device, geometry.device)


def _broadcast(keep: Tensor, geometry: Geometry, grid: tuple[int, int], axes: str) -> Tensor:
    if not isinstance(keep, Tensor):
        raise MaskError(f"keep is {type(keep).__name__}: pass a bool tensor")
    if keep.dtype != torch.bool or keep.is_nested or keep.layout != torch.strided:
        raise MaskError(f"keep is {odd_layout(keep) or keep.dtype}: pass a bool tensor")
    if not _beside(keep, geometry):
        raise MaskError(f"keep is on {keep.device}: move it to the call's device {geometry.device}")
    shape = geometry.map_shape(*grid)
    try:
        return keep.expand(shape)
    except RuntimeError:
        wanted = f"[batch, query heads, {axes}] = {shape}"
        raise MaskError(f"keep has shape {tuple(keep.shape)}: it must broadcast to {wanted}") from None


def _union(a: SparseMask, b: SparseMask) -> SparseMask:
    """Tiles meet as maps, which are not turned into lists yet; stripes stay lists where only one side has them."""
    if not a.has_tiles and a.stripes is None:
        return b
    if not b.has_tiles and b.stripes is None:
        return a
    for tiles, stripes in ((a, b), (b, a)):
        if tiles.stripes is None and not stripes.has_tiles and stripes.group_rows % tiles.tile_q == 0:
            of = stripes.with_stripe_width(math.gcd(stripes.stripe_width, tiles.tile_k))
            group = of.group_rows // tiles.tile_q
            return evolve(tiles, group=group, stripes=of.stripes, stripe_width=of.stripe_width, disjoint=False)
    tile_q, tile_k = math.gcd(a.tile_q, b.tile_q), math.gcd(a.tile_k, b.tile_k)
    maps = [_map_on(mask, tile_q, tile_k) for mask in (a, b) if mask.has_tiles]
    tiles_of_both = (maps[0] | maps[-1] if len(maps) == 2 else maps[0]) if maps else None
    striped, width = b if a.stripes is None else a, _width_of(a, b, tile_k)
    lists, group_rows = striped.with_stripe_width(width).stripes, striped.group_rows
    if a.stripes is not None and b.stripes is not None:
        group_rows = math.gcd(a.group_rows, b.group_rows)
        lists = IndexLists.from_map(a.stripes_on(group_rows, width) | b.stripes_on(group_rows, width))
    return SparseMask(a.geometry, tile_q, tile_k, tiles_of_both, group_rows // tile_q, lists, stripe_width=width)


def _difference(a: SparseMask, b: SparseMask) -> SparseMask:
    """Pairs of `a` that `b` does not hold, exact for any grids and any mixture of tiles and stripes.

    A tile of `a` that a stripe of `b` runs through is broken up: what is left of it becomes stripes.
    """
    if not (a.has_tiles or a.stripes is not None) or not (b.has_tiles or b.stripes is not None):
        return a
    geometry, tile_q, tile_k = a.geometry, math.gcd(a.tile_q, b.tile_q), math.gcd(a.tile_k, b.tile_k)
    keep = a.tiles_on(tile_q, tile_k) & ~b.tiles_on(tile_q, tile_k)
    left, rows, width = None, tile_q, _width_of(a, b, tile_k)
    if a.stripes is not None or b.stripes is not None:
        rows = _rows_left(a, b, tile_q)
        left = a.stripes_on(rows, width)
        if b.has_tiles:
            left = left & ~_columns(b.tiles_on(rows, tile_k), tile_k // width, left.shape[3])
        if b.stripes is not None:
            cut = b.stripes_on(rows, width)
            if a.has_tiles:  # then rows == tile_q, so `keep` and `cut` have the same rows
                broken = keep & (by_block(cut, tile_k // width) > 0)
                keep = keep & ~broken
                left = left | _columns(broken, tile_k // width, left.shape[3])
            left = left & ~cut
    tiles = TileMap(geometry=geometry, tile_q=tile_q, tile_k=tile_k, keep=keep)
    stripes, group = None if left is None else IndexLists.from_map(left), rows // tile_q
    return evolve(a, tile_q=tile_q, tile_k=tile_k, tiles=tiles, group=group, stripes=stripes, stripe_width=width)


def _width_of(a: SparseMask, b: SparseMask, tile_k: int) -> int:
    """Tokens of a column of what is made of two masks on key tiles of `tile_k`; 1 where neither has stripes."""
    widths = [mask.stripe_width for mask in (a, b) if mask.stripes is not None]
    return math.gcd(*widths, tile_k) if widths else 1


@kept_by_sizes()
def _groups_of(geometry: Geometry, rows: int, large: int) -> Tensor:
    """int64 [B, R]: of groups of `rows` query tokens, in which group of `large` tokens each is."""
    return geometry.tile_at(geometry.tiles(rows) * rows, large)


def _map_on(mask: SparseMask, tile_q: int, tile_k: int) -> TileMap:
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


def _rows_left(a: SparseMask, b: SparseMask, tile_q: int) -> int:
    """Query rows per group of the stripes that a difference leaves: the most that serve every side."""
    if a.has_tiles and b.stripes is not None:
        return tile_q
    sizes = [mask.group_rows for mask in (a, b) if mask.stripes is not None]
    return math.gcd(*sizes, b.tile_q) if b.has_tiles else math.gcd(*sizes)


def _columns(tiles: Tensor, ratio: int, columns: int) -> Tensor:
    """A map of key tiles as one of columns, `ratio` of which make a tile."""
    return tiles.repeat_interleave(ratio, dim=-1)[..., :columns]


def _row_chunks(geometry: Geometry, step: int, pairs: int = 1 << 22) -> Sequence[Tensor]:
    """Every `step`-th query row, in chunks of about `pairs` (query, key) pairs over batch and heads."""
    size = max(1, pairs // (geometry.batch * geometry.heads * geometry.kv_len))
    chunks: Sequence[Tensor] = torch.arange(0, geometry.q_len, step, device=geometry.device).split(size)
    return chunks
