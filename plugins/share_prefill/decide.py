"""Algorithms 3 and 4: which heads of a layer share a pivot, and which run dense to make one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.statistics.divergence import js_distance
from sparseprefill.statistics.slashes import slash_tiles

from .records import Choice, Pivots

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

    from .heads import LayerHeads


def choose(
    own: Tensor, seen: Tensor, heads: LayerHeads, pivots: Pivots | None, layer: int, tau: float, delta: float
) -> Choice:
    """From the heads' block-averaged attention `own` ``[B, H, C]`` over the blocks `seen` (bool ``[B, C]``).

    All heads of a layer at once: of a cluster without a pivot the first head that may make one runs dense, and the
    others do not wait for it, nor do heads of the layer that come in a later part of the call.
    """
    cluster = heads.clusters(own.device)
    uniform = seen.to(own.dtype) / seen.sum(-1, keepdim=True).clamp(min=1)
    able = heads.members(own.device) & (js_distance(own, uniform[:, None]) < delta)
    makes = able & heads.makers(own.device)
    if pivots is None:
        share = torch.zeros_like(able)
    else:
        ready = pivots.ready(layer)[:, cluster]
        share = able & ready & (js_distance(own, pivots.last[:, cluster].to(own.dtype)) < tau)
        makes = makes & ~pivots.taken[:, cluster]
    before = (cluster[:, None] == cluster).tril(-1)
    dense = makes & ~(makes[:, None] & before).any(-1)
    return Choice(torch.stack([share, dense, share | dense]), own)


def pattern_tiles(
    geometry: Geometry, slashes: Tensor, block: int, choice: Choice, heads: LayerHeads, pivots: Pivots | None
) -> Tensor:
    """bool ``[B, H, R, C]``: by choice the tiles of the cluster's pivot, all, or those of slashes ``[B, H, S]``."""
    if kernels.serve(slashes):
        from . import launch

        packed = None if pivots is None else pivots.packed
        return launch.pattern_tiles(geometry, slashes, block, choice.flags, heads.codes(slashes.device), packed)
    tiles = slash_tiles(geometry, slashes, block)
    if pivots is not None:
        shared = pivots.pattern(heads.clusters(slashes.device))
        tiles = torch.where(choice.share[..., None, None], shared, tiles)
    return tiles | choice.dense[..., None, None]
