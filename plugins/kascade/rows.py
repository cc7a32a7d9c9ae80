"""Which rows of a tile are summed, and for how many each stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.statistics.by_tile import row_lse

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.geometry import Geometry


@frozen(eq=False)
class Rows:
    """The rows of some tiles that are summed, ``[B, n, R]``: index of each, int64, and for how many rows it stands.

    weight is float32 (float64 for float64 calls), 0 where there is no such row.
    """

    index: Tensor
    weight: Tensor

    @classmethod
    def of(cls, geometry: Geometry, tiles: Tensor, tile: int, count: int, dtype: torch.dtype) -> Rows:
        """A tile's rows in `count` stretches, the last real row of each for all of it. tiles: int64 ``[B, n]``."""
        edges = torch.arange(count + 1, device=tiles.device) * tile // count
        first = geometry.first_position()[:, None, None]
        behind = torch.minimum(first[:, 0, 0] + geometry.q_len, geometry.key_counts())[:, None, None]
        at = (tiles[..., None] * tile + edges).clamp(min=first.clamp(min=0))
        at = torch.minimum(at, torch.maximum(behind, first.clamp(min=0)))
        index = (at[..., 1:] - 1 - first).clamp(0, geometry.q_len - 1)
        return cls(index, (at[..., 1:] - at[..., :-1]).to(dtype))

    def some(self, tiles: slice) -> Rows:
        """Those of some of the tiles (views)."""
        return Rows(self.index[:, tiles], self.weight[:, tiles])

    def lse(self, call: AttentionCall) -> Tensor:
        """``[B, Hq, n * R]``: of each row over all keys that it may see."""
        return row_lse(call, self.index.flatten(1), self.weight.flatten(1) > 0)


def sum_type(call: AttentionCall) -> torch.dtype:
    """What sums are made in."""
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32
