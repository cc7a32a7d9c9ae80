"""Block-averaged attention, exact: of the last queries as shares, for the tests, and of whole maps, for pivots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sparseprefill.errors import StageError
from sparseprefill.statistics.pooled import real_rows

if TYPE_CHECKING:
    from sparseprefill.mask.mask import SparseMask


def shares(sums: Tensor) -> Tensor:
    """Sums ``[B, H, C]`` as shares of each head's whole (a-hat, Algorithm 3); 0 where that is 0."""
    whole = sums.sum(-1, keepdim=True)
    share: Tensor = sums / torch.where(whole == 0, 1.0, whole)
    return share


def on_blocks(probe: Tensor, mask: SparseMask, block: int) -> Tensor:
    """``[B, H, R, C]``: `Result.probe` on tiles of ``block x block``.

    A refiner may have put the mask on a finer grid: columns are then summed, rows averaged by their number of real
    queries. StageError where the mask's tiles do not divide the block.
    """
    if (mask.tile_q, mask.tile_k) == (block, block):
        return probe
    if block % mask.tile_q or block % mask.tile_k:
        raise StageError(
            f"share-prefill: the mask has tiles of {mask.tile_q} x {mask.tile_k} tokens; refiners must leave tiles "
            f"that divide block={block}, or no pivot can be made from it"
        )
    geometry = mask.geometry
    bins, parts = geometry.tile_columns(block), block // mask.tile_k
    x = functional.pad(probe, (0, bins * parts - probe.shape[-1])).unflatten(-1, (bins, parts)).sum(-1)
    weight = real_rows(geometry, mask.tile_q)
    row = torch.div(geometry.tiles(mask.tile_q) * mask.tile_q, block, rounding_mode="floor")
    row = (row - geometry.first_tile(block)[:, None]).clamp(0, geometry.tile_rows(block) - 1)
    at = row[:, None, :, None].expand(-1, x.shape[1], -1, bins)
    summed = x.new_zeros(*x.shape[:2], geometry.tile_rows(block), bins)
    summed.scatter_add_(2, at, x * weight[:, None, :, None])
    mean: Tensor = summed / real_rows(geometry, block).clamp(min=1)[:, None, :, None]
    return mean
