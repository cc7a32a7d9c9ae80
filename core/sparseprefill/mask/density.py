"""How dense a mask is: exact, in closed form per tile and stripe, never by a dense matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.mask.count import selected_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.mask.mask import SparseMask


def density(mask: SparseMask, *, tiles: bool = True) -> float:
    """Selected pairs over the pairs that causality, window and padding allow (host sync)."""
    return share(selected_pairs(mask, tiles=tiles), mask.geometry)


def share(pairs: Tensor, geometry: Geometry) -> float:
    """The share that int64 pairs ``[B, Hq]`` are of those that the geometry allows; 0 where it allows none."""
    allowed = allowed_pairs(geometry)
    return int(pairs.sum()) / allowed if allowed else 0.0


def allowed_pairs(geometry: Geometry) -> int:
    """Pairs that causality, window and padding allow, over batch and heads (host sync)."""
    return int(geometry.visible_counts().sum()) * geometry.heads
