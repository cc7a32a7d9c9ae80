"""Worth of a plan's pairs, as its estimator leaves it for refiners that have to choose."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import MaskError, ParameterError, SparsePrefillError, StageError, printed, told
from sparseprefill.mask.geometry import by_block, reachable_map, regrid, rows_around, same_device
from sparseprefill.validate import LARGEST

ENTRIES = 1 << 25
"""Scores of columns in memory at once, where one list of them does not need more."""


class ScoresError(StageError):
    """Scores that an estimator left for later cannot be read; a pipeline says in its own error who left them."""


class Priority(ABC):
    """Scores of tiles and of key columns: worth per key, more is more important.

    The unit is the share of a query row's attention that a key is thought to hold, averaged over the rows in question;
    so tiles and columns, and different methods, can be compared. NaN means that nothing is known, and ranks last.
    Scores are worked out when a refiner asks: a plan that nobody narrows pays nothing for them.
    """

    __slots__ = ()
    checked = False

    def check(self, call: AttentionCall) -> None:
        """MaskError for scores of another call, as far as sizes and devices of what is there tell. Makes nothing.

        A pipeline asks when a stage hands them over; a class that has it says so by `checked`.
        """
        return

    @abstractmethod
    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """Float ``[B, h, R, C]``, h the query heads or 1, for the tiles of a grid: worth of each of a tile's keys."""
        ...

    @abstractmethod
    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """Float ``[B, h, n, Nkv]``: worth of each key, by its position, to the group of queries around a query.

        position: int64 ``[B, n]``, of that query on its row's grid. heads: query heads; h is their number or 1.
        """
        ...


Scores = Tensor | Callable[["AttentionCall"], Tensor]


@frozen(eq=False, kw_only=True)
class PriorityScores(Priority):
    """A priority of scores in tensors, or in functions of the call that make them when they are first read.

    tiles: float ``[B, h, R, C]``, the attention share of whole tiles of ``tile_q x tile_k`` tokens. columns: float
    ``[B, h, G, Nkv]``, that of single keys by position, for groups of `rows` query tokens; None for one group of all.
    h is the number of query heads or 1. One of the two may be missing: a tile is then worth what its columns are
    together, and a column as much as any other of its tile. A tile of another grid takes the score at its first query
    and first key. What a function makes is kept as long as scores are asked for one call; another call has its own.

    Raises ParameterError where both are missing, or tiles come without their size, or for what is no tensor of scores
    and no function; StageError, when scores are read, where a function fails or makes what does not fit the call.
    """

    tiles: Scores | None = None
    tile_q: int | None = None
    tile_k: int | None = None
    columns: Scores | None = None
    rows: int | None = None
    checked: bool = field(default=False, init=False, repr=False)
    _made: dict[str, tuple[weakref.ref[AttentionCall], Tensor]] = field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name, scores in (("tiles", self.tiles), ("columns", self.columns)):
            fits = _is_scores(scores) if isinstance(scores, Tensor) else scores is None or callable(scores)
            if not fits:
                raise ParameterError(
                    f"PriorityScores.{name} is {printed(scores)}: pass {SCORES}, or a function of them"
                )
        for name, size in (("tile_q", self.tile_q), ("tile_k", self.tile_k), ("rows", self.rows)):
            if size is not None and not (type(size) is int and 1 <= size <= LARGEST):
                remedy = "pass a positive number of tokens, below 2^31"
                raise ParameterError(f"PriorityScores.{name} is {printed(size)}: {remedy}")
        object.__setattr__(self, "checked", isinstance(self.tiles, Tensor) or isinstance(self.columns, Tensor))
        if self.tiles is None and self.columns is None:
            raise ParameterError("PriorityScores has no scores: pass tiles, or columns, or both")
        if self.tiles is not None and (self.tile_q is None or self.tile_k is None):
            given = f"tile_q={self.tile_q!r}, tile_k={self.tile_k!r}"
            raise ParameterError(f"PriorityScores.tiles has {given}: pass the tokens of a tile")

    def check(self, call: AttentionCall) -> None:
        """MaskError for tensors that do not fit the call; functions are not asked."""
        for name, scores in (("tiles", self.tiles), ("columns", self.columns)):
            if isinstance(scores, Tensor) and (why := self._objection(name, scores, call)):
                raise MaskError(why)

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        if self.tiles is None:
            return tiles_of_columns(self, call, self.rows, tile_q, tile_k)
        old_q, old_k = cast(tuple[int, int], (self.tile_q, self.tile_k))
        geometry, scores = call.geometry, self._scores("tiles", self.tiles, call) / old_k
        rows = regrid(geometry, scores, old_q, tile_q)
        if old_k == tile_k:
            return rows
        column = torch.arange(geometry.tile_columns(tile_k), device=geometry.device) * tile_k // old_k
        return rows[..., column.clamp(max=rows.shape[3] - 1)]

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        geometry = call.geometry
        if self.columns is not None:
            scores, rows = self._scores("columns", self.columns, call), self.rows
        else:
            scores, rows = self._scores("tiles", cast(Scores, self.tiles), call), self.tile_q
        scores = scores[:, heads] if scores.shape[1] > 1 else scores
        picked = scores if rows is None else rows_around(geometry, scores, position, rows)
        if self.columns is None and self.tile_k is not None:
            picked = (picked / self.tile_k).repeat_interleave(self.tile_k, dim=-1)[..., : geometry.kv_len]
        return picked.expand(-1, -1, position.shape[1], -1)

    def _scores(self, name: str, given: Scores, call: AttentionCall) -> Tensor:
        if isinstance(given, Tensor):
            found = given
        else:
            kept = self._made.get(name)
            if kept is not None and kept[0]() is call:
                return kept[1]
            found = asked(f"PriorityScores.{name}", given, call)
        if why := self._objection(name, found, call):
            raise ScoresError(why)
        if found is not given:
            self._made[name] = weakref.ref(call), found
        return found

    def _objection(self, name: str, scores: Any, call: AttentionCall) -> str:
        """The reason why these are no scores of the call; empty where they are."""
        geometry = call.geometry
        if name == "tiles":
            sizes = geometry.map_shape(cast(int, self.tile_q), cast(int, self.tile_k))
            words = f"{self.tile_q} x {self.tile_k} tokens"
        else:
            sizes = geometry.map_shape(geometry.kv_len if self.rows is None else self.rows, 1)
            sizes = sizes if self.rows is not None else (*sizes[:2], 1, sizes[3])
            words = "one group" if self.rows is None else f"groups of {self.rows} query rows"
        return unfit(f"PriorityScores.{name}", scores, call, sizes, f" for {words}", broadcast=2)


@frozen(eq=False)
class BestOf(Priority):
    """The highest score of several priorities, for the union of their plans; NaN only where all say NaN."""

    checked = True
    parts: tuple[Priority, ...]

    def check(self, call: AttentionCall) -> None:
        """MaskError as of the parts."""
        for part in self.parts:
            part.check(call)

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        return reduce(torch.fmax, [part.tile_scores(call, tile_q, tile_k) for part in self.parts])

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        return reduce(torch.fmax, [part.column_scores(call, position, heads) for part in self.parts])


SCORES = "a float tensor of four dimensions"


def _is_scores(scores: Any) -> bool:
    plain = isinstance(scores, Tensor) and scores.layout == torch.strided and not scores.is_nested
    return plain and scores.dim() == 4 and scores.is_floating_point()


def unfit(
    name: str, scores: Any, call: AttentionCall, sizes: tuple[int, int, int, int], words: str = "", broadcast: int = 4
) -> str:
    """The reason why something is no tensor of scores of these sizes, ``[B, Hq, *, *]``; empty where it is.

    words: about the sizes, for people. broadcast: how many of the first dimensions may be 1.
    """
    if not _is_scores(scores):
        return f"{name} is {printed(scores)}: it must be {SCORES}"
    if scores.device != call.q.device and not same_device(scores.device, call.q.device):
        return f"{name} is on {scores.device}: it must be on the call's device, {call.q.device}"
    pairs = enumerate(zip(scores.shape, sizes, strict=True))
    if all(found == wanted or (found == 1 and i < broadcast) for i, (found, wanted) in pairs):
        return ""
    may = "each of them" if broadcast == len(sizes) else "batch and heads"
    return f"{name} is {printed(scores)}: it must be [B, Hq, *, *] = {list(sizes)}{words}; {may} may be 1"


def asked(name: str, give: Callable[..., Any], *args: Any) -> Any:
    """The answer of a function of a stranger's that makes scores; ScoresError, with its name, for what it raises."""
    try:
        return give(*args)
    except torch.OutOfMemoryError:
        raise
    except ScoresError:
        raise
    except Exception as error:
        shown = told(error) if isinstance(error, SparsePrefillError) else f"{type(error).__name__}: {told(error)}"
        raise ScoresError(f"{name} raised {shown}") from error


def tiles_of_columns(priority: Priority, call: AttentionCall, rows: int | None, tile_q: int, tile_k: int) -> Tensor:
    """Tile scores as the mean of the scores of their columns, which groups of `rows` query tokens share.

    rows: None for one group of all. Works on some heads and groups at a time.
    """
    geometry = call.geometry
    heads = geometry.heads
    first = geometry.first_position()[:, None]
    position = first if rows is None else geometry.tiles(rows) * rows
    groups = max(1, ENTRIES // (geometry.batch * geometry.kv_len))
    some = max(1, groups // position.shape[1])
    parts = []
    for head in range(0, heads, some):
        here = slice(head, min(head + some, heads))
        each = [by_block(priority.column_scores(call, at, here), tile_k) for at in position.split(groups, 1)]
        parts.append(torch.cat(each, 2))
    means = torch.cat(parts, 1) / tile_k
    if rows is None:
        return means.expand(-1, -1, geometry.tile_rows(tile_q), -1)
    return regrid(geometry, means, rows, tile_q)


def nearness(call: AttentionCall, first: Tensor | int, tile: int) -> Tensor:
    """Float ``[B, 1, R, C]``: what a method without scores leaves: attention that falls with the distance.

    A tile d tiles before the query's own has a share in proportion to ``1 / (1 + d)``; of the first `first` tiles
    (int64 ``[B]``, or a number), which are there as sinks, the j-th at least to ``1 / (1 + j)``.
    """
    geometry = call.geometry
    column = torch.arange(geometry.tile_columns(tile), device=geometry.device)
    distance = (geometry.tiles(tile)[..., None] - column).clamp(min=0)
    first = first[:, None, None] if isinstance(first, Tensor) else first
    weight = torch.maximum(1 / (1 + distance), (column < first) / (1 + column))
    weight = weight * reachable_map(geometry, tile, tile)
    return (weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny))[:, None]
