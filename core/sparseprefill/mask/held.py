"""What a plan's masks hold of some query tiles: key tiles as a map, stripes apart, a few rows at a time."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import rows_at
from sparseprefill.mask.lists import IndexLists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparseprefill.mask.mask import SparseMask

ALIGNED = 16
"""Maps of lists are that wide, or a multiple of it."""


@frozen(eq=False)
class KeptKeys:
    """Which keys a mask keeps for sampled rows, several of which may share a line.

    map: bool ``[B, Hq, L, X]``, by position on the row's grid; more than Nkv columns change nothing: kernels like whole
    tiles, and a multiple of 16. line: int64 ``[B, n]``, the line of each row; None where each has its own.
    """

    map: Tensor
    line: Tensor | None = None

    @property
    def by_row(self) -> Tensor:
        """bool ``[B, Hq, n, X]``."""
        return self.map if self.line is None else rows_at(self.map, self.line)


@frozen(eq=False)
class Held:
    """The masks of a plan, its carry's region included, on one grid. Nothing is read on the host.

    grid: tokens of a query tile and of a key tile, which divide those of all masks. map: bool ``[B, Hq, R, C]``, the
    key tiles that a mask holds as tiles; not to be written to.
    """

    grid: tuple[int, int]
    map: Tensor
    masks: tuple[SparseMask, ...]


def stripes_at(masks: Sequence[SparseMask], position: Tensor, width: int) -> KeptKeys | None:
    """The stripes of rows by their position on the batch row's grid, int64 ``[B, n]``; None where no mask has any.

    At least `width` columns, and a multiple of 16. Lists that several rows share are read once.
    """
    found = []
    for mask in masks:
        if mask.stripes is None:
            continue
        lists, geometry = mask.stripes, mask.geometry
        group = torch.div(position, mask.group_rows, rounding_mode="floor")
        index = (group - geometry.first_tile(mask.group_rows)[:, None]).clamp(0, lists.shape[2] - 1)
        size = (width + -width % ALIGNED, mask.stripe_width)
        if lists.shape[2] <= index.shape[1]:
            found.append(KeptKeys(lists.to_map(*size), index))
            continue
        each = index[:, None].expand(-1, geometry.heads, -1)
        counts, offsets = (torch.gather(x, 2, each) for x in (lists.counts, lists.offsets))
        found.append(KeptKeys(IndexLists(counts, offsets, lists.indices).to_map(*size)))
    if len(found) < 2:
        return found[0] if found else None
    return KeptKeys(reduce(or_, [one.by_row for one in found]))
