"""Sampled query rows: the query tiles of a call dealt to stretches, and what a plan's masks hold of some rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import rows_at
from sparseprefill.mask.geometry import Geometry, kept_by_sizes
from sparseprefill.mask.mask import SparseMask


@frozen(eq=False)
class Stretches:
    """The sampled query rows, and the query tiles for which each speaks. Nobody may write to the tensors.

    tile: tokens of a query tile. rows: int64 ``[B, n]``, index among the call's queries of each sampled row, the last
    of its stretch. real: bool ``[B, n]``, which of them exist. position: int64 ``[B, n]``, on the row's token grid.
    own: int64 ``[B, n]``, which of the call's query tiles holds it. first: int64 ``[B, n]``, the first query tile of
    the stretch, by its index on the grid. of: int64 ``[B, R]``, the stretch of each query tile. inhabited: bool
    ``[B, R]``, tiles with a real row. each: stretches of a span.
    """

    tile: int
    rows: Tensor
    real: Tensor
    position: Tensor
    own: Tensor
    first: Tensor
    of: Tensor
    inhabited: Tensor
    each: int

    @property
    def several(self) -> bool:
        """True if the call has more spans than one."""
        return self.rows.shape[1] > self.each

    def in_spans(self, x: Tensor) -> Tensor:
        """int64 ``[B, H, P]``: sums over the query tiles of each span, of x int64 ``[B, H, R]``."""
        if not self.several:
            return x.sum(-1, keepdim=True)
        total = torch.zeros(*x.shape[:2], self.rows.shape[1] // self.each, dtype=torch.int64, device=x.device)
        return total.scatter_add_(2, self._span(x.shape[1]), x)

    def to_tiles(self, x: Tensor) -> Tensor:
        """``[B, H, R]``: of x ``[B, H, P]`` what belongs to each query tile's span."""
        if not self.several:
            return x.expand(*x.shape[:2], self.of.shape[1])
        return torch.gather(x, 2, self._span(x.shape[1]))

    def _span(self, heads: int) -> Tensor:
        return (self.of // self.each)[:, None].expand(-1, heads, -1)


@kept_by_sizes(lengths=True)
def deal(geometry: Geometry, tile: int, rows: int, span: int | None) -> Stretches:
    """T query tiles go to ``K = min(rows, T)`` stretches, tile t to stretch ``t * K // T``.

    Tiles are counted from the first that holds a real row; or from the multiple of `span` tokens before each, and then
    T are the tiles of a span. Nothing is read on the host.
    """
    (start, begin, behind), number = geometry.token_range(), geometry.tile_rows(tile)
    if span is None:
        base = (begin // tile)[:, None]
        tiles = (((behind + tile - 1) // tile)[:, None] - base).clamp(min=1)
        each, spans = min(rows, number), 1
    else:
        in_span = span // tile
        base = (begin // span)[:, None] * in_span
        tiles = torch.full_like(base, in_span)
        each, spans = min(rows, in_span), geometry.tile_rows(span)
    dealt = tiles.clamp(max=each)  # K of each batch row
    sample = torch.arange(spans * each, device=geometry.device)
    place, nth = sample // each * tiles, sample % each
    first, end = (base + place + ((nth + more) * tiles + dealt - 1) // dealt for more in (0, 1))
    position = torch.minimum(end * tile, behind[:, None]) - 1
    real = (position >= torch.maximum(first * tile, begin[:, None])) & (nth < dealt)
    tile_at = geometry.tiles(tile)
    inner = (tile_at - base).clamp(min=0)
    inhabited = ((tile_at + 1) * tile > begin[:, None]) & (tile_at * tile < behind[:, None])
    of = inner * dealt // tiles  # each tile of a span is dealt alike, so spans need no word here
    own = position // tile - tile_at[:, :1]
    return Stretches(
        tile=tile,
        rows=(position - start[:, None]).clamp(min=0),
        real=real,
        position=position,
        own=own.clamp(min=0),
        first=first,
        of=of.clamp(0, sample.numel() - 1),
        inhabited=inhabited,
        each=each,
    )


ALIGNED = 16
"""Maps of lists are that wide, or a multiple of it."""


class Raised(NamedTuple):
    """A floor's addition to a plan.

    added: bool ``[B, Hq, R, C]``, tiles that the plan gets. before, after: ``[B, Hq, n]``, mass that sampled rows kept
    of theirs, and keep now. dense: bool ``[B, Hq, P]``, spans of heads that get every tile.
    """

    added: Tensor
    before: Tensor
    after: Tensor
    dense: Tensor


@frozen(eq=False)
class KeptKeys:
    """Keys that a mask keeps for sampled rows, several of which may share a line.

    map: bool ``[B, Hq, L, X]``, by position on the row's grid; more than Nkv columns change nothing: kernels like whole
    tiles, and a multiple of 16. line: int64 ``[B, n]``, the line of each row; None where each has its own.
    """

    map: Tensor
    line: Tensor | None = None

    @property
    def by_row(self) -> Tensor:
        """bool ``[B, Hq, n, X]``."""
        return self.map if self.line is None else rows_at(self.map, self.line)


def stripes_at(masks: Sequence[SparseMask], position: Tensor, width: int) -> KeptKeys | None:
    """The stripes of rows by their position on the batch row's grid, int64 ``[B, n]``; None where no mask has any.

    At least `width` columns, and a multiple of 16. Lists that several rows share are read once.
    """
    found = []
    for mask in masks:
        if mask.stripes is None:
            continue
        lists, geometry = mask.stripes, mask.geometry
        index = geometry.tile_at(position, mask.group_rows)
        size = (width + -width % ALIGNED, mask.stripe_width)
        if lists.shape[2] <= index.shape[1]:
            found.append(KeptKeys(lists.to_map(*size), index))
        else:
            found.append(KeptKeys(lists.of_rows(index).to_map(*size)))
    if len(found) < 2:
        return found[0] if found else None
    return KeptKeys(reduce(or_, [one.by_row for one in found]))
