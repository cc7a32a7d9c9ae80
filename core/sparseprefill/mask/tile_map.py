"""TileMap: a set of tiles as a bool map and rules, turned into lists once, when an executor asks for them.

Rules that choose by chance do so by an integer hash with the same bits on every device: 32-bit words in int64 tensors,
no product above 2^63.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.errors import MaskError, printed
from sparseprefill.mask.geometry import Geometry, kept_by_sizes, reachable_map, regrid, same_device
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.recorded import OfLayer
from sparseprefill.validate import LARGEST, WIDEST

if TYPE_CHECKING:
    from sparseprefill.kernels.lists.maps import Rules

WORD = 0xFFFFFFFF
STRIDE, RANDOM = 1, 2
"""Uses of a seed: refiners of one seed do not choose alike."""

KEPT = 1 << 16
"""Tiles of a call up to which lists of rules alone are kept: 256 KB. Longer calls take the GPU longer than the host."""

Word = TypeVar("Word", int, Tensor)


def mix(x: Word) -> Word:
    """A bijection of 32-bit words in which every input bit moves every output bit with probability about 1/2."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def fold(state: Word, word: Word) -> Word:
    """The hash of one word more."""
    return mix(((state ^ (word & WORD)) + 0x9E3779B9) & WORD)


@cache
def layer_hash(use: int, seed: int, layer: int) -> int:
    """The hash of what all tiles of a layer have in common."""
    state = 0
    for word in (use, seed & WORD, seed >> 32, layer):
        state = fold(state, word)
    return state


def hash_of_layer(use: int, seed: int, layer: int) -> OfLayer:
    """`layer_hash`, which a recording repeats for other layers."""
    return OfLayer.at(layer, partial(layer_hash, use, seed))


def row_hash(geometry: Geometry, tile_q: int, state: int, first_head: int = 0) -> Tensor:
    """int64 ``[B, Hq, R]``: hash of (state, head, index of the query tile on its row's grid).

    first_head: number among the layer's heads of the first one here.
    """
    head = first_head + torch.arange(geometry.heads, device=geometry.device)
    heads = fold(torch.full_like(head, state), head)
    return fold(heads[None, :, None], geometry.tiles(tile_q)[:, None])


def hashed_below(states: Tensor, columns: int, bound: int, entries: int = 1 << 22) -> Tensor:
    """bool ``[B, Hq, R, columns]``: where the hash of (state, column) is below `bound`, in chunks of query tiles."""
    column = torch.arange(columns, device=states.device)
    step = max(1, entries // max(1, states.shape[0] * states.shape[1] * columns))
    return torch.cat([fold(part[..., None], column) < bound for part in states.split(step, dim=2)], dim=2)


@frozen
class Stride:
    """Every `every`-th key tile of a query tile, from a phase of its own: a hash that begins with `state`."""

    every: int
    state: int


@frozen
class Random:
    """Tiles whose hash, which begins with `state`, is below `bound` (of 2^32)."""

    bound: int
    state: int


def _differ(one: object, other: object) -> bool:
    if one is None or other is None or one is other:
        return False
    return isinstance(one, Tensor) or isinstance(other, Tensor) or one != other


Rows = tuple[int, int] | Tensor
"""A half-open range of query tiles, by their index on each batch row's grid: one for all rows, or int32 [B, 2]."""


def rows_map(geometry: Geometry, tile_q: int, rows: Rows) -> Tensor:
    """bool [B, R]: the query tiles of a call that lie in a range. Nobody may write to it."""
    if not isinstance(rows, Tensor):
        return _rows_between(geometry, tile_q, *rows)
    tile = geometry.tiles(tile_q)
    return (tile >= rows[:, :1]) & (tile < rows[:, 1:])


@kept_by_sizes()
def _rows_between(geometry: Geometry, tile_q: int, first: int, behind: int) -> Tensor:
    tile = geometry.tiles(tile_q)
    return (tile >= first) & (tile < behind)


def _is_rows(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.is_nested and value.dtype == torch.int32 and value.dim() == 2 and value.shape[1] == 2
    return isinstance(value, tuple) and len(value) == 2 and all(_is_count(one, 1 - WIDEST) for one in value)


def _is_count(value: object, least: int = 0, most: int = WIDEST - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_stride(value: object) -> bool:
    return isinstance(value, Stride) and _is_count(value.every, 1) and _is_count(value.state, 0, WORD)


def _is_random(value: object) -> bool:
    return isinstance(value, Random) and _is_count(value.bound, 1, WORD + 1) and _is_count(value.state, 0, WORD)


def _is_map(value: object) -> bool:
    if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided:
        return False
    return value.dtype == torch.bool


RULES: tuple[tuple[str, object, Callable[[Any], bool], str], ...] = (
    ("keep", None, _is_map, "a bool tensor [B, h, R, C], or None"),
    *((name, 1, lambda x: _is_count(x, 1), "a positive number of tiles") for name in ("per_row", "per_column")),
    ("band", None, _is_count, "a number of tiles, an integer from 0, or None"),
    ("sink", 0, _is_count, "a number of tiles, an integer from 0"),
    ("dense", None, _is_rows, "two numbers of query tiles, (first, behind), int32 [B, 2], or None"),
    ("stride", None, _is_stride, "a Stride(every from 1, state from 0 to 2^32 - 1), or None"),
    ("random", None, _is_random, "a Random(bound 1 to 2^32, state from 0 to 2^32 - 1), or None"),
    ("first_head", 0, lambda x: _is_count(x, 0, LARGEST), "the number of a head, an integer from 0, below 2^31"),
)
"""Fields of a `TileMap`, their defaults, what fits, and what to pass."""


@frozen(eq=False, kw_only=True)
class TileMap:
    """The tiles that a map or any rule keeps, of those that causality and window let a row of theirs see.

    keep: bool ``[B, h, R / per_row, C / per_column]`` or None, on tiles `per_row` and `per_column` times those of the
    mask; h divides the heads, and neighbouring heads share an entry. It is read when lists or the map are first asked
    for, so nobody may write to it afterwards. band: the diagonal tiles and so many before them. sink: so many first
    tiles. dense: query tiles that keep every key tile. stride, random: by hash of (head, tile), `first_head` being the
    number of head 0.
    """

    geometry: Geometry
    tile_q: int
    tile_k: int
    keep: Tensor | None = None
    per_row: int = 1
    per_column: int = 1
    band: int | None = None
    sink: int = 0
    dense: Rows | None = None
    stride: Stride | None = None
    random: Random | None = None
    first_head: int = 0

    def __attrs_post_init__(self) -> None:
        for name, usual, fits, remedy in RULES:
            value = getattr(self, name)
            if value is not usual and not fits(value):
                raise MaskError(f"TileMap.{name} is {printed(value)}: pass {remedy}")
        if isinstance(self.dense, Tensor) and (
            self.dense.shape[0] != self.geometry.batch or not same_device(self.dense.device, self.geometry.device)
        ):
            remedy = f"pass one range for each of {self.geometry.batch} batch rows, on {self.geometry.device}"
            raise MaskError(f"TileMap.dense is {printed(self.dense)} on {self.dense.device}: {remedy}")
        if self.keep is None:
            return
        wanted = self.geometry.map_shape(self.tile_q * self.per_row, self.tile_k * self.per_column)
        (batch, heads, rows, columns), shape = wanted, tuple(self.keep.shape)
        if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, rows, columns) or heads % shape[1]:
            raise MaskError(f"TileMap.keep has shape {shape}: pass [{batch}, {heads} or a divisor, {rows}, {columns}]")
        device = self.keep.device
        if device != self.geometry.device and not same_device(device, self.geometry.device):
            raise MaskError(f"TileMap.keep is on {device}: move it to the call's device {self.geometry.device}")
        if self.keep.stride(1) == 0:  # heads that are views of one
            object.__setattr__(self, "keep", self.keep[:, :1])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch rows, heads, query tiles."""
        return self.geometry.batch, self.geometry.heads, self.geometry.tile_rows(self.tile_q)

    @property
    def rows_alone(self) -> Rows | None:
        """The map's dense query tiles, where it keeps nothing else."""
        others = self.keep is not None or self.band is not None or self.sink or self.by_head
        return None if others else self.dense

    @property
    def by_head(self) -> bool:
        """True if a rule keeps other tiles for each head."""
        return self.stride is not None or self.random is not None

    @property
    def shared(self) -> int:
        """The number of neighbouring heads that keep the same tiles, whatever the map holds."""
        if self.by_head:
            return 1
        return self.geometry.heads // (1 if self.keep is None else self.keep.shape[1])

    @cached_property
    def lists(self) -> IndexLists:
        """The tiles as lists; one launch on a GPU. Of rules that say the same in every layer they are made once, where
        they are small."""
        if self.keep is not None or self.by_head or isinstance(self.dense, Tensor):
            return self._lists()
        batch, _, rows, columns = self.geometry.map_shape(self.tile_q, self.tile_k)
        if batch * rows * columns > KEPT:
            return self._lists()
        return _ruled(self.geometry, self.tile_q, self.tile_k, self.band, self.sink, self.dense)

    def _lists(self) -> IndexLists:
        if kernels.serve_device(self.geometry.device):
            from sparseprefill.kernels.lists.maps import encode

            same = not self.by_head and (self.keep is None or self.keep.shape[1] == 1)
            return IndexLists(*encode(*self.kernel_arguments()), same_heads=same, sound=True)
        return IndexLists.from_map(self.resolved)

    @cached_property
    def resolved(self) -> Tensor:
        """bool ``[B, H, R, C]``."""
        return self.by_group(1)

    def united(self, group: int) -> TileMap:
        """The map that gives all of `group` neighbouring heads what any of them keeps."""
        if self.shared % group == 0:
            return self
        return TileMap(geometry=self.geometry, tile_q=self.tile_q, tile_k=self.tile_k, keep=self.by_group(group))

    def left_of(self, rows: Rows) -> TileMap:
        """Every tile in reach for a range of query tiles, but those of this map."""
        every, group = TileMap(geometry=self.geometry, tile_q=self.tile_q, tile_k=self.tile_k, dense=rows), self.shared
        if kernels.serve_device(self.geometry.device):
            keep = every.by_group(group) & ~self.by_group(group)
        else:
            reach = reachable_map(self.geometry, self.tile_q, self.tile_k)[:, None]
            keep = (every._by_rules() & ~self._by_rules() & reach)[:, ::group]
        return evolve(every, dense=None, keep=keep)

    def joined(self, others: Sequence[TileMap]) -> TileMap:
        """The union with one or more others, all on one grid; rules meet before maps do."""
        return self | reduce(or_, others)

    def __or__(self, other: TileMap) -> TileMap:
        """The union; both on one grid."""
        differ = any(_differ(getattr(self, name), getattr(other, name)) for name in ("stride", "random", "dense"))
        if differ or (self.by_head and other.by_head and self.first_head != other.first_head):
            return self._plain() | other
        if self.keep is not None and other.keep is not None:
            return evolve(self._plain(), keep=self.resolved | other.resolved)
        mapped = self if other.keep is None else other
        bands = [one.band for one in (self, other) if one.band is not None]
        return evolve(
            mapped,
            band=max(bands, default=None),
            sink=max(self.sink, other.sink),
            dense=other.dense if self.dense is None else self.dense,
            stride=self.stride or other.stride,
            random=self.random or other.random,
            first_head=self.first_head if self.by_head else other.first_head,
        )

    def _plain(self) -> TileMap:
        """The tiles as a map without rules."""
        return TileMap(geometry=self.geometry, tile_q=self.tile_q, tile_k=self.tile_k, keep=self.resolved)

    def by_group(self, group: int) -> Tensor:
        """bool ``[B, H / group, R, C]``: what any of each `group` neighbouring heads keeps."""
        if kernels.serve_device(self.geometry.device):
            from sparseprefill.kernels.lists.maps import resolve

            return resolve(*self.kernel_arguments(), group)
        return self.plain(group)

    def kernel_arguments(self) -> tuple[Geometry, int, int, Tensor | None, Rules, int, int]:
        """Arguments of `kernels.lists.maps`: this map in plain tensors and numbers."""
        from sparseprefill.kernels.lists.maps import Rules

        stride, random = self.stride, self.random
        rules = Rules(
            band=self.band,
            sink=self.sink,
            every=None if stride is None else stride.every,
            stride_state=0 if stride is None else stride.state,
            random_state=0 if random is None else random.state,
            random_last=None if random is None else random.bound - 1,
            first_head=self.first_head,
            dense=self.dense,
        )
        return self.geometry, self.tile_q, self.tile_k, self.keep, rules, self.per_row, self.per_column

    def plain(self, group: int = 1) -> Tensor:
        """bool ``[B, H / group, R, C]`` in plain PyTorch: what any of `group` neighbouring heads keeps."""
        keep = self._by_rules() & reachable_map(self.geometry, self.tile_q, self.tile_k)[:, None]
        return keep if group == 1 else keep.unflatten(1, (-1, group)).any(2)

    def _by_rules(self) -> Tensor:
        """bool ``[B, H, R, C]`` in plain PyTorch, what is out of reach included."""
        geometry, (tile_q, tile_k) = self.geometry, (self.tile_q, self.tile_k)
        shape = geometry.map_shape(tile_q, tile_k)
        column = torch.arange(shape[3], device=geometry.device)
        kept = (column < self.sink).expand(shape)
        if self.keep is not None:
            keep = self.keep.repeat_interleave(shape[1] // self.keep.shape[1], dim=1)
            keep = keep.repeat_interleave(self.per_column, dim=-1)[..., : shape[3]]
            kept = kept | (keep if self.per_row == 1 else regrid(geometry, keep, tile_q * self.per_row, tile_q))
        if self.dense is not None:
            kept = kept | rows_map(geometry, tile_q, self.dense)[:, None, :, None]
        if self.band is not None:
            tiles = geometry.tiles(tile_q)[..., None]
            first = tiles * tile_q // tile_k - self.band
            last = ((tiles + 1) * tile_q - 1) // tile_k
            kept = kept | ((column >= first) & (column <= last))[:, None]
        if self.stride is not None:
            every = self.stride.every
            phase = row_hash(geometry, tile_q, self.stride.state, self.first_head) % every
            kept = kept | (column % every == ((every - phase) % every)[..., None])
        if self.random is not None:
            states = row_hash(geometry, tile_q, self.random.state, self.first_head)
            kept = kept | hashed_below(states, shape[3], self.random.bound)
        return kept


@kept_by_sizes()
def _ruled(
    geometry: Geometry, tile_q: int, tile_k: int, band: int | None, sink: int, dense: tuple[int, int] | None
) -> IndexLists:
    """The lists of rules by place alone. Nobody may write to them."""
    return TileMap(geometry=geometry, tile_q=tile_q, tile_k=tile_k, band=band, sink=sink, dense=dense)._lists()
