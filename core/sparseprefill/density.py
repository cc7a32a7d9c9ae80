"""How many pairs a mask selects: exact, in closed form per tile and stripe, never by a dense matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.mask import SparseMask


def selected_pairs(mask: SparseMask, *, tiles: bool = True) -> Tensor:
    """int64 [B, Hq]: allowed (query, key) pairs selected; without `tiles`, those of the stripes alone.

    One head at a time, so that memory stays at that of one head's lists.
    """
    geometry = mask.geometry
    totals = [[_head(mask.head(b, h), tiles) for h in range(geometry.heads)] for b in range(geometry.batch)]
    return torch.tensor(totals, dtype=torch.int64)


def density(mask: SparseMask, *, tiles: bool = True) -> float:
    """Selected pairs over the pairs that causality, window and padding allow."""
    allowed = int(mask.geometry.visible_counts().sum()) * mask.geometry.heads
    return int(selected_pairs(mask, tiles=tiles).sum()) / allowed if allowed else 0.0


def _head(mask: SparseMask, count_tiles: bool) -> int:
    geometry, total = mask.geometry, 0
    tile = geometry.tiles(mask.tile_q)[0]
    first = torch.maximum(tile * mask.tile_q, geometry.first_position()).clamp(min=0)
    behind = torch.minimum((tile + 1) * mask.tile_q, geometry.first_position() + geometry.q_len)
    last = torch.minimum(behind, geometry.key_counts()) - 1
    if mask.tiles is not None and count_tiles:
        entry, index = mask.tiles.padded(int(mask.tiles.counts.max()))
        lo = index[0, 0] * mask.tile_k
        pairs = _pairs(first, last, lo, mask.tile_k, geometry.window)
        total += int((pairs * entry[0, 0]).sum())
    if mask.stripes is not None:
        entry, index = (x[0, 0] for x in mask.stripes.padded(int(mask.stripes.counts.max())))
        group = torch.div(tile, mask.group, rounding_mode="floor") - geometry.first_tile(mask.group_rows)
        taken = mask.tile_map()[0, 0] if mask.tiles is not None and count_tiles and not mask.disjoint else None
        for rows in torch.arange(tile.numel(), device=tile.device).split(max(1, (1 << 24) // max(1, index.shape[-1]))):
            key, one = index[group[rows]], entry[group[rows]]
            if taken is not None:
                column = torch.div(key, mask.tile_k, rounding_mode="floor").clamp(0, taken.shape[-1] - 1)
                one = one & ~torch.gather(taken[rows], 1, column)
            total += int((_pairs(first[rows], last[rows], key, 1, geometry.window) * one).sum())
    return total


def _pairs(first: Tensor, last: Tensor, lo: Tensor, width: int, window: int | None) -> Tensor:
    """Allowed pairs of query rows first..last (per list row) with keys lo..lo+width-1 (per entry)."""
    first, last = first[:, None], torch.maximum(last, first - 1)[:, None]
    pairs = _ramp(last + 1 - lo, width) - _ramp(first - lo, width)
    if window is not None:
        pairs = pairs - _ramp(last + 1 - window - lo, width) + _ramp(first - window - lo, width)
    return pairs


def _ramp(n: Tensor, width: int) -> Tensor:
    """Sum of clamp(t, 0, width) over t = 1..n."""
    n = n.clamp(min=0)
    low = n.clamp(max=width)
    return low * (low + 1) // 2 + (n - low) * width
