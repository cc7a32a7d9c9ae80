"""Random masks for the executor alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from attrs import evolve

from sparseprefill.call import AttentionCall
from sparseprefill.mask.mask import SparseMask

from .case import Part

TILE, GROUP = 128, 16
"""Tokens of a tile; query tiles that share their stripes."""


def random_mask(call: AttentionCall, parts: Sequence[Part], seed: int) -> SparseMask:
    """The union of the parts, always the same for a seed and a device."""
    source = torch.Generator(call.q.device).manual_seed(seed)
    mask = reduce(or_, [_of(call, part, source) for part in parts])
    apart = {part.kind for part in parts} == {"diagonal", "stripes"}  # columns stand before their group's tiles
    return evolve(mask, disjoint=True) if apart else mask


def _of(call: AttentionCall, part: Part, source: torch.Generator) -> SparseMask:
    if part.kind == "full":
        return SparseMask.full(call, TILE)
    if part.kind == "diagonal":
        return SparseMask.from_rules(call, TILE, band=0)
    return (_tiles if part.kind == "tiles" else _stripes)(call, part.share, source)


def _tiles(call: AttentionCall, share: float, source: torch.Generator) -> SparseMask:
    g = call.geometry
    drawn = torch.rand(
        g.batch, g.heads, g.tile_rows(TILE), g.tile_columns(TILE), generator=source, device=source.device
    )
    return SparseMask.from_tiles(call, drawn < share, TILE)


def _stripes(call: AttentionCall, share: float, source: torch.Generator) -> SparseMask:
    """Columns before each group, as AnchorAttention selects them, without the diagonal."""
    g = call.geometry
    groups = g.tile_rows(TILE * GROUP)
    before = g.tiles(TILE * GROUP)[..., None] * TILE * GROUP
    keep = torch.empty(g.batch, g.heads, groups, g.kv_len, dtype=torch.bool, device=source.device)
    for row in range(g.batch):  # a head at a time: drawn at once, the numbers would take gigabytes
        for head in range(g.heads):
            keep[row, head] = torch.rand(groups, g.kv_len, generator=source, device=source.device) < share
    keep &= (torch.arange(g.kv_len, device=source.device) < before)[:, None]
    return evolve(SparseMask.from_stripes(call, keep, GROUP, diagonal=False), disjoint=True)
