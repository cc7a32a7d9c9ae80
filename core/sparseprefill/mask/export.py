"""Masks in the formats of other kernels: FlexAttention's BlockMask, and the block lists of FlashAttention-4.

Both want blocks on the grid of indices, told apart into full ones, which run unmasked, and partial ones, whose pairs
a function decides. Our tiles lie on each row's own token grid. So queries and keys are cut wherever a block or a tile
begins: a cell between two cuts lies in one block and in one tile, and a block is full if all its cells are, and partial
if any pair of any cell is selected. Nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill.errors import MaskError
from sparseprefill.mask.count import ENTRIES, Lists
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.lists import IndexLists

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BITS = 8
"""Columns of a byte of the map that FlexAttention looks stripes up in."""


class Fa4Lists(NamedTuple):
    """Blocks as flash-attn-4 takes them: the fields of its ``BlockSparseTensorsTorch``, by the same names.

    mask_block_cnt, full_block_cnt: int32 ``[B, H, R]``, how many blocks of each query block are partial, and full.
    mask_block_idx, full_block_idx: int32 ``[B, H, R, C]``, which key blocks these are, ascending; what stands behind a
    count means nothing. H is 1 where all heads have the same lists. block_size: tokens of a query and of a key block.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


@frozen(eq=False)
class Selection:
    """A mask's choice. tiles: bool ``[B, h, R, C]`` or None; h is 1 where all heads have the same tiles.

    stripes: lists ``[B, Hq, G]`` of columns of `stripe_width` tokens for groups of `group` query tiles, or None.
    """

    geometry: Geometry
    tile_q: int
    tile_k: int
    group: int
    stripe_width: int
    tiles: Tensor | None
    stripes: IndexLists | None

    @property
    def heads(self) -> int:
        """Heads that have lists of their own: 1 where all have the same."""
        own_tiles = self.tiles is not None and self.tiles.shape[1] > 1
        own_stripes = self.stripes is not None and not self.stripes.same_heads
        return self.geometry.heads if own_tiles or own_stripes else 1


def to_flex(selection: Selection, block: tuple[int, int]) -> BlockMask:
    """A BlockMask ``[B, Hq or 1, Nq, Nkv]`` for torch's FlexAttention; see `SparseMask.to_flex`."""
    from torch.nn.attention.flex_attention import BlockMask

    geometry = selection.geometry
    partial_count, partial, full_count, full = _lists(selection, block, geometry.lengths, whole_rows=True)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        full_count,
        full,
        BLOCK_SIZE=block,
        mask_mod=_mask_mod(selection),
        seq_lengths=(geometry.q_len, geometry.kv_len),
    )


def to_fa4(selection: Selection, block: tuple[int, int] | None) -> Fa4Lists:
    """Lists for flash-attn-4's block-sparse attention; see `SparseMask.to_fa4`. MaskError for what it cannot carry."""
    g, tile = selection.geometry, (selection.tile_q, selection.tile_k)
    size = tile if block is None else block
    if selection.stripes is not None:
        raise MaskError(
            "the mask has stripes, and FlashAttention-4's lists hold blocks: pass a mask of tiles, or use to_flex()"
        )
    if g.starts is not None:
        why = "the call has starts: FlashAttention-4's blocks begin at index 0 of the tensors"
        raise MaskError(f"{why}; pass rows without left padding, or use to_flex()")
    if tile[0] % size[0] or tile[1] % size[1]:
        raise MaskError(f"block is {size}: pass sizes that divide the mask's tiles, {tile}, or none for the tiles")
    if g.q_offset % size[0]:
        why = f"q_offset is {g.q_offset}, so query 0 lies inside a tile of {size[0]}"
        raise MaskError(f"{why}: cut the prompt at a multiple, pass a block that divides it, or use to_flex()")
    # Rows of right padding do not make a block partial: causality hides what is behind a row's end from real queries.
    return Fa4Lists(*_lists(selection, size, None, whole_rows=False), size)


@frozen(eq=False)
class _Cells:
    """One axis, cut wherever a block or a tile begins.

    first, last: int64 ``[b, n]``, positions on each row's grid; last < first where two cuts fall together. block:
    int64 ``[b, n]``, ascending. b is 1 where all batch rows are cut alike. count: blocks.
    """

    first: Tensor
    last: Tensor
    block: Tensor
    count: int

    @property
    def plain(self) -> bool:
        """True if a cell is a block: blocks begin wherever a tile begins."""
        return self.first.shape[1] == self.count

    @classmethod
    def of(cls, start: Tensor | int, length: int, block: int, tile: int, device: torch.device) -> _Cells:
        """start: position of index 0, int64 ``[B]`` where rows differ."""
        place = start if isinstance(start, int) else start[:, None]
        blocks = torch.arange(0, length, block, device=device)
        first = -start % tile if isinstance(start, int) else None
        if first is not None and first % block == tile % block == 0:  # tiles begin where blocks begin
            cuts = blocks[None]
        elif first == 0 and block % tile == 0:  # and the other way round
            cuts = torch.arange(0, length, tile, device=device)[None]
        elif isinstance(place, int):
            tiles = torch.arange(min(-place % tile, length), length, tile, device=device)
            cuts = torch.cat([blocks, tiles]).sort().values[None]
        else:
            number = torch.arange(length // tile + 1, device=device)
            tiles = ((place - 1) // tile + 1 + number) * tile - place
            cuts = torch.cat([blocks.expand(len(place), -1), tiles.clamp(max=length)], 1).sort(1).values
        ends = functional.pad(cuts[:, 1:], (0, 1), value=length) - 1
        within = (cuts // block).clamp(max=len(blocks) - 1)
        return cls(cuts + place, ends + place, within, len(blocks))

    def gathered(self, x: Tensor, grid: int, first: Tensor | int, axis: int) -> Tensor:
        """The entry in which each cell lies, of an axis of `x` by tiles of `grid` tokens. first: number of entry 0."""
        at = (self.first // grid - first).clamp(0, x.shape[axis] - 1)
        if self.plain and at.shape[1] == x.shape[axis] and self.count == x.shape[axis]:
            return x
        return torch.take_along_dim(x, self._along(at, x.dim(), axis), axis)

    def summed(self, x: Tensor, axis: int) -> Tensor:
        """bool cells as blocks: whether any cell of a block is set."""
        if self.plain:
            return x
        shape = list(x.shape)
        shape[axis] = self.count
        total = torch.zeros(shape, dtype=torch.int32, device=x.device)
        index = self._along(self.block, x.dim(), axis).expand(x.shape)
        return total.scatter_add_(axis, index, x.to(torch.int32)) > 0

    def _along(self, cells: Tensor, dims: int, axis: int) -> Tensor:
        """``[b, n]`` as a tensor of so many dimensions, n along an axis."""
        return cells.view(-1, *(cells.shape[1] if one == axis else 1 for one in range(1, dims)))


@frozen(eq=False)
class _Seen:
    """Verdict of causality, window and padding on cells, bool ``[b, 1, n, m]``: that some pair, that every pair is
    seen.

    low, high: int64 ``[b, n]``: of a query cell's keys, no key before `low` and none from `high` on is seen.
    """

    some: Tensor
    every: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, geometry: Geometry, rows: _Cells, keys: _Cells, lengths: Tensor | None) -> _Seen:
        """lengths: that make a cell with rows behind them not fully seen; None for no such rows."""
        behind = geometry.key_counts()[:, None]
        if geometry.lengths is None and geometry.starts is None:
            behind = behind[:1]
        first, last = rows.first.clamp(min=0), torch.minimum(rows.last, behind - 1)
        low = torch.zeros_like(first) if geometry.window is None else first - geometry.window + 1
        low, high = low.clamp(min=0), torch.where(first <= last, last + 1, 0)
        key, key_last = keys.first.clamp(min=0)[:, None], keys.last[:, None]
        some = (key <= key_last) & (key < high[..., None]) & (key_last >= low[..., None])
        real = (rows.first >= 0) & (rows.first <= rows.last)
        if lengths is not None:
            real = real & (rows.last < lengths.to(torch.int64)[:, None])
        every = real[..., None] & (keys.first >= 0)[:, None] & (keys.last[:, None] <= rows.first[..., None])
        if geometry.window is not None:
            every = every & (rows.last[..., None] - keys.first[:, None] < geometry.window)
        return cls(some[:, None], every[:, None] & some[:, None], low, high)


def _lists(
    selection: Selection, block: tuple[int, int], lengths: Tensor | None, *, whole_rows: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts ``[B, h, R]`` and indices ``[B, h, R, C]`` of partial blocks, and of full ones; all int32.

    whole_rows: whether a query block that reaches beyond the last query is partial.
    """
    g = selection.geometry
    start: Tensor | int = 0 if g.starts is None else -g.starts.to(torch.int64)
    rows = _Cells.of(g.q_offset + start, g.q_len, block[0], selection.tile_q, g.device)
    keys = _Cells.of(start, g.kv_len, block[1], selection.tile_k, g.device)
    seen = _Seen.of(g, rows, keys, lengths)
    shape = (g.batch, selection.heads, rows.count)
    counts = [torch.empty(shape, dtype=torch.int32, device=g.device) for _ in range(2)]
    indices = [torch.empty(*shape, keys.count, dtype=torch.int32, device=g.device) for _ in range(2)]
    for heads in _heads(selection.heads, g.batch * rows.first.shape[1] * keys.first.shape[1]):
        some, every = _cells(selection, rows, keys, seen, heads)
        gap = ~every & (rows.first <= rows.last)[:, None, :, None] & (keys.first <= keys.last)[:, None, None]
        used, gap = (keys.summed(rows.summed(x, 2), 3) for x in (some, gap))
        if whole_rows and g.q_len % block[0]:
            gap[:, :, -1] = True
        if g.kv_len % block[1]:
            gap[..., -1] = True
        for at, keep in enumerate((used & gap, used & ~gap)):
            counts[at][:, heads], indices[at][:, heads] = _ordered(keep)
    return counts[0], indices[0], counts[1], indices[1]


def _heads(heads: int, entries: int) -> Iterator[slice]:
    """Few heads at a time, so that temporary tensors stay small. entries: of one head."""
    step = max(1, ENTRIES // max(1, entries))
    return (slice(head, min(head + step, heads)) for head in range(0, heads, step))


def _cells(selection: Selection, rows: _Cells, keys: _Cells, seen: _Seen, heads: slice) -> tuple[Tensor, Tensor]:
    """bool ``[B, h, n, m]``: cells with a pair that is selected and seen, and cells where every pair is."""
    g = selection.geometry
    shape = (g.batch, heads.stop - heads.start, rows.first.shape[1], keys.first.shape[1])
    some = every = torch.zeros((), dtype=torch.bool, device=g.device)
    if selection.tiles is not None:
        tiles = selection.tiles if selection.tiles.shape[1] == 1 else selection.tiles[:, heads]
        tiles = rows.gathered(tiles, selection.tile_q, _first(g, selection.tile_q), 2)
        tiles = keys.gathered(tiles, selection.tile_k, 0, 3)
        some = every = tiles
    if selection.stripes is not None:
        span = selection.tile_q * selection.group
        group = rows.first // span - _first(g, span)
        group = group.clamp(0, selection.stripes.counts.shape[2] - 1)  # cells without a row lie in no group
        lists = Lists.of(selection.stripes, heads, selection.stripe_width, g).of_rows(group.expand(g.batch, -1))
        edges = torch.cat([keys.first, keys.last[:, -1:] + 1], 1)[:, None, None]
        before = _keys_below(lists, edges)  # [B, h, n, m + 1], keys of stripes before each cell
        low, high = (_keys_below(lists, x[:, None])[..., None] for x in (seen.low, seen.high))
        some = some | (torch.minimum(before[..., 1:], high) > torch.maximum(before[..., :-1], low))
        every = every | (before.diff(dim=-1) == (keys.last + 1 - keys.first)[:, None, None])
    return (some & seen.some).expand(shape), (every & seen.every).expand(shape)


def _keys_below(lists: Lists, bound: Tensor) -> Tensor:
    """int64: how many keys of each list stand before `bound`, which broadcasts as in `Lists.below`."""
    if lists.width == 1:
        return lists.below(bound)
    number = lists.below((bound + lists.width - 1) // lists.width)
    offsets = lists.offsets.view(*lists.offsets.shape, *[1] * (bound.dim() - lists.offsets.dim()))
    last = lists.indices[(offsets + number - 1).clamp(0, lists.indices.numel() - 1)].to(torch.int64)
    return number * lists.width - torch.where(number > 0, ((last + 1) * lists.width - bound).clamp(min=0), 0)


def _first(geometry: Geometry, tile: int) -> Tensor | int:
    """Index on each row's grid of the call's first query tile: ``[B, 1]``, or one number for all rows."""
    return geometry.q_offset // tile if geometry.starts is None else geometry.first_tile(tile)[:, None]


def _ordered(keep: Tensor) -> tuple[Tensor, Tensor]:
    """Count the set ones of bool ``[..., C]``, int32 ``[...]``, and list them, int32 ``[..., C]``, with zeros behind
    them."""
    columns = keep.shape[-1]
    slot = torch.where(keep, keep.cumsum(-1) - 1, columns)
    found = torch.zeros(*keep.shape[:-1], columns + 1, dtype=torch.int32, device=keep.device)
    numbers = torch.arange(columns, dtype=torch.int32, device=keep.device)
    found.scatter_(-1, slot, numbers.expand_as(keep))
    return keep.sum(-1, dtype=torch.int32), found[..., :columns]


def _mask_mod(selection: Selection) -> MaskMod:
    """True where a pair is selected and seen, by indices of batch row, head, query and key: tensors of one number each.

    Everything is looked up in maps on the device: of tiles a byte each, of stripes a bit for each column and group.
    """
    g, tile_q, tile_k, width = selection.geometry, selection.tile_q, selection.tile_k, selection.stripe_width
    span, window, offset = tile_q * selection.group, g.window, g.q_offset
    starts, reals = g.starts, None if g.starts is None and g.lengths is None else g.key_counts().to(torch.int32)
    first = g.first_tile(tile_q).to(torch.int32)
    first_group = g.first_tile(span).to(torch.int32)
    tiles, stripes = selection.tiles, selection.stripes
    bits = None if stripes is None else _bits(stripes, g.tile_columns(width))
    tile_heads, stripe_heads = (x is not None and x.shape[1] > 1 for x in (tiles, bits))
    tiles, bits = (x if x is None or x.shape[1] > 1 else x[:, 0] for x in (tiles, bits))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row, key = q + offset, k
        if starts is not None:
            row, key = row - starts[b], k - starts[b]
        seen = row >= key
        if starts is not None:
            seen = seen & (key >= 0)
            key = key.clamp(min=0)
        if reals is not None:
            seen = seen & (row < reals[b])
        if window is not None:
            seen = seen & (row - key < window)
        chosen = torch.zeros_like(seen)
        if tiles is not None:
            at = row // tile_q - (offset // tile_q if starts is None else first[b])
            chosen = chosen | (tiles[b, h, at, key // tile_k] if tile_heads else tiles[b, at, key // tile_k])
        if bits is not None:
            at = row // span - (offset // span if starts is None else first_group[b])
            column = key // width
            byte = bits[b, h, at, column // BITS] if stripe_heads else bits[b, at, column // BITS]
            chosen = chosen | ((byte.to(torch.int32) >> (column % BITS)) & 1).to(torch.bool)
        return seen & chosen

    return mask_mod


def _bits(stripes: IndexLists, columns: int) -> Tensor:
    """uint8 ``[B, h, G, columns / 8]``: a bit for each column, set where it is a stripe; a few groups at a time."""
    stripes = stripes.distinct
    (batch, heads, groups), device = stripes.shape, stripes.counts.device
    bits = torch.empty(batch, heads, groups, -(-columns // BITS), dtype=torch.uint8, device=device)
    values = (1 << torch.arange(BITS, device=device)).to(torch.uint8)
    for part in _heads(groups, batch * heads * columns):
        keep = functional.pad(stripes[:, :, part].to_map(columns), (0, -columns % BITS)).unflatten(-1, (-1, BITS))
        bits[:, :, part] = (keep * values).sum(-1, dtype=torch.uint8)
    return bits
