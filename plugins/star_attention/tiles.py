"""The anchored-block mask of Star Attention, as lists of key tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

    from .sizes import Sizes


def star_mask(geometry: Geometry, sizes: Sizes, tile: int) -> SparseMask:
    """Section 2: a context row sees the anchor and its own block (phase 1), any other row every key (phase 2)."""
    columns = geometry.tile_columns(tile)
    row = geometry.tiles(tile)
    behind = torch.where(row >= 0, row + 1, 0).clamp(max=columns)
    block = sizes.block[:, None]
    start = torch.div(row.clamp(min=0), block, rounding_mode="floor") * block
    anchor = torch.minimum(sizes.anchor[:, None], start)
    first = torch.stack([torch.zeros_like(start), start], -1)
    last = torch.stack([torch.minimum(anchor, behind), behind], -1)
    width = min(sizes.most_anchor + sizes.most_block, columns)
    lists = IndexLists.from_ranges(first, last, geometry.heads, width)
    if sizes.phases:
        lists = lists.filled(row >= sizes.context[:, None], geometry, tile, tile)
    return SparseMask(geometry, tile, tile, lists)
