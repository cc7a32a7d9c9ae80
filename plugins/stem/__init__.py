"""Stem's budget that falls with position, as a refiner (arXiv 2603.06274)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparseprefill.method import hookimpl

if TYPE_CHECKING:
    from sparseprefill.stages import MaskRefiner


@hookimpl
def sparseprefill_refiners() -> Mapping[str, type[MaskRefiner]]:
    """The one refiner of this package."""
    from .decay import PositionDecay

    return {"position-decay": PositionDecay}
