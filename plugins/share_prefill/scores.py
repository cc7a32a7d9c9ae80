"""Block-averaged attention: of the last queries for the tests, of the whole map for pivots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sparseprefill.errors import StageError

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.statistics.sampled import SampledMass


def seen_blocks(geometry: Geometry, rows: Tensor, real: Tensor, block: int) -> Tensor:
    """bool ``[B, C]``: blocks with a key that one of the sampled rows, the call's last ones, may see."""
    column = torch.arange(geometry.tile_columns(block), device=geometry.device)
    if geometry.starts is None and geometry.lengths is None:
        end = geometry.q_offset + geometry.q_len
        seen = column < -(-end // block)
        if geometry.window is not None:
            seen = seen & (column >= max(end - rows.shape[1] - geometry.window + 1, 0) // block)
        return seen.expand(geometry.batch, -1)
    query = torch.gather(geometry.query_positions(), 1, rows)
    last = torch.where(real, query, -1).amax(1)
    first = torch.zeros_like(last)
    if geometry.window is not None:
        near = torch.where(real, query, geometry.kv_len).amin(1)
        first = (near - geometry.window + 1).clamp(min=0)
    low, high = (torch.div(x, block, rounding_mode="floor")[:, None] for x in (first, last))
    return (column >= low) & (column <= high)


def block_sums(mass: SampledMass, block: int) -> Tensor:
    """``[B, H, C]``: the sampled rows' attention in each block."""
    columns = mass.columns
    missing = -columns.shape[-1] % block
    if missing:
        columns = functional.pad(columns, (0, missing))
    total: Tensor = columns.unflatten(-1, (-1, block)).sum(-1)
    return total


def shares(sums: Tensor) -> Tensor:
    """The same as shares of each head's whole (a-hat, Algorithm 3); 0 where that is 0."""
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
    weight = _real_rows(geometry, mask.tile_q)
    row = torch.div(geometry.tiles(mask.tile_q) * mask.tile_q, block, rounding_mode="floor")
    row = (row - geometry.first_tile(block)[:, None]).clamp(0, geometry.tile_rows(block) - 1)
    at = row[:, None, :, None].expand(-1, x.shape[1], -1, bins)
    summed = x.new_zeros(*x.shape[:2], geometry.tile_rows(block), bins)
    summed.scatter_add_(2, at, x * weight[:, None, :, None])
    mean: Tensor = summed / _real_rows(geometry, block).clamp(min=1)[:, None, :, None]
    return mean


def _real_rows(geometry: Geometry, tile: int) -> Tensor:
    """int64 ``[B, R]``: real queries of the call in each query tile."""
    first = geometry.first_position().clamp(min=0)
    last = torch.minimum(geometry.first_position() + geometry.q_len, geometry.key_counts())
    low = geometry.tiles(tile) * tile
    return (torch.minimum(low + tile, last[:, None]) - torch.maximum(low, first[:, None])).clamp(min=0)
