"""The record of a call that runs in parts: how many pairs it computed, and its masks where they are small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch
from attrs import define, evolve, field

from sparseprefill.errors import MaskError
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.parts.split import Part
    from sparseprefill.plan import Kernel, Skipped

KEPT = 256 << 20
"""Bytes of index lists that the masks of all parts may hold to be kept."""


@define(eq=False)
class Recorder:
    """Makes the record while the parts run: pairs counted on the device, and masks as long as there is room.

    geometry: of the whole call. masks: each part with its masks, disjoint ones; None once they were too large to keep.
    kernels: what computed the parts, each once. skipped: what they left out together, who voted being the last part's.
    """

    geometry: Geometry
    pairs: Tensor = field(init=False)
    skipped: Skipped | None = None
    count: int = 0
    held: int = 0
    masks: list[tuple[Part, tuple[SparseMask, ...]]] | None = field(factory=list)
    kernels: dict[Kernel, None] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        g = self.geometry
        self.pairs = torch.zeros(g.batch, g.heads, dtype=torch.int64, device=g.device)

    def add(
        self, part: Part, masks: tuple[SparseMask, ...], kernels: tuple[Kernel, ...], skipped: Skipped | None
    ) -> None:
        """Count one part's masks (`Plan.computed`) and what it left out of them, without host synchronisation, and keep
        the masks while there is room."""
        if skipped is not None:
            pairs = torch.zeros_like(self.pairs) if self.skipped is None else self.skipped.pairs
            pairs[:, slice(*part.heads)] += skipped.pairs
            self.skipped = evolve(skipped, pairs=pairs)
        self.kernels.update(dict.fromkeys(kernels))
        for mask in masks:
            self.pairs[:, slice(*part.heads)] += mask.pairs()
        self.count += 1
        self.held += sum(mask.nbytes for mask in masks)
        if self.held > KEPT:
            self.masks = None
        elif self.masks is not None:
            self.masks.append((part, masks))

    def mask(self) -> SparseMask:
        """Everything computed, as one mask of the call; MaskError where the parts' masks were not kept."""
        if self.masks is None:
            raise MaskError(
                f"the call ran in {self.count} parts, and their masks were not kept (more than {KEPT >> 20} MiB): "
                "density is there; for the mask, run it in one part with attrs.evolve(pipeline, workspace=None)"
            )
        columns = zip(*([(part, mask) for mask in masks] for part, masks in self.masks), strict=True)
        return reduce(or_, [_joined(self.geometry, pieces) for pieces in columns])


def _joined(geometry: Geometry, pieces: Sequence[tuple[Part, SparseMask]]) -> SparseMask:
    """One mask of masks by parts, which come rows outside, heads inside; all on one grid, and cut along it."""
    group = math.gcd(*(mask.group for _, mask in pieces))  # refiners split groups, where they widen some of their rows
    widths = [mask.stripe_width for _, mask in pieces if mask.stripes is not None]
    width = math.gcd(*widths) if widths else 1
    pieces = [(part, mask.regrouped(group).with_stripe_width(width)) for part, mask in pieces]
    masks = [mask for _, mask in pieces]
    first = masks[0]
    grid = (first.tile_q, first.tile_k, first.group)
    cuts = {part.rows[0] + geometry.q_offset for part, _ in pieces if part.rows[0]}
    striped = any(mask.stripes is not None for mask in masks)
    rows = first.group_rows if striped else first.tile_q
    if any((mask.tile_q, mask.tile_k, mask.group) != grid for mask in masks) or any(cut % rows for cut in cuts):
        raise MaskError("the parts' masks lie on grids that cannot be joined; parts are cut inside a tile or group")
    return evolve(
        first,
        geometry=geometry,
        tiles=_join([(part, mask.tiles, mask.geometry.tile_rows(mask.tile_q)) for part, mask in pieces]),
        stripes=_join([(part, mask.stripes, mask.geometry.tile_rows(mask.group_rows)) for part, mask in pieces]),
        disjoint=all(mask.disjoint for mask in masks),
    )


def _join(pieces: list[tuple[Part, IndexLists | None, int]]) -> IndexLists | None:
    """Lists side by side; where a part has none, empty ones of so many rows."""
    found = next((lists for _, lists, _ in pieces if lists is not None), None)
    if found is None:
        return None
    batch, device = found.counts.shape[0], found.counts.device
    by_rows: dict[int, list[IndexLists]] = {}
    for part, given, rows in pieces:
        empty = IndexLists.empty(batch, part.heads[1] - part.heads[0], rows, device)
        by_rows.setdefault(part.rows[0], []).append(empty if given is None else given)
    return IndexLists.joined([IndexLists.joined(heads, 1) for heads in by_rows.values()], 2)
