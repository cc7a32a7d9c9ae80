"""The pivots of one request: what clusters have learnt from their dense heads so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.geometry import Geometry
    from sparseprefill.memory import Memory

KEY = "share-prefill"


@frozen(eq=False)
class Pivots:
    """One pivot per batch row and cluster, made in some layer of one call of the model.

    layer: the last layer that wrote. ready: bool ``[B, K]``. last: ``[B, K, C]``, block-averaged attention of the pivot
    head's last queries (the paper's a~). tiles: bool ``[B, K, R, C]``, its pattern (M).
    """

    geometry: Geometry
    layer: int
    ready: Tensor
    last: Tensor
    tiles: Tensor

    @classmethod
    def none(cls, call: AttentionCall, block: int, clusters: int, dtype: torch.dtype) -> Pivots:
        """No cluster has one."""
        geometry = call.geometry
        batch, rows, columns = geometry.batch, geometry.tile_rows(block), geometry.tile_columns(block)
        return cls(
            geometry,
            call.layer,
            torch.zeros(batch, clusters, dtype=torch.bool, device=geometry.device),
            torch.zeros(batch, clusters, columns, dtype=dtype, device=geometry.device),
            torch.zeros(batch, clusters, rows, columns, dtype=torch.bool, device=geometry.device),
        )

    def updated(self, layer: int, which: Tensor, made: Tensor, last: Tensor, tiles: Tensor) -> Pivots:
        """With the pivots of the clusters `which` (int64 ``[S]``) replaced where `made` (bool ``[B, S]``)."""
        ready, old_last, old_tiles = self.ready.clone(), self.last.clone(), self.tiles.clone()
        ready[:, which] |= made
        old_last[:, which] = torch.where(made[..., None], last, self.last[:, which])
        old_tiles[:, which] = torch.where(made[..., None, None], tiles, self.tiles[:, which])
        return Pivots(self.geometry, layer, ready, old_last, old_tiles)


def earlier(call: AttentionCall, memory: Memory) -> Pivots | None:
    """Pivots that earlier layers made in this very call of the model; None where there are none.

    A pivot holds a pattern for the query rows that it was made from. The next chunk of the prompt has other rows, and
    its own pivots: it shows by other sizes, or by the layers starting over.
    """
    pivots: Pivots | None = memory.get(KEY, None)
    if pivots is None or call.layer <= pivots.layer or not pivots.geometry.fits(call.geometry):
        return None
    return pivots
