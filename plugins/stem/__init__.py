"""Stem's two ideas as refiners: a budget that falls with position, and scores weighted by values (arXiv 2603.06274)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparseprefill.method import hookimpl

if TYPE_CHECKING:
    from sparseprefill.stages import MaskRefiner


@hookimpl
def sparseprefill_refiners() -> Mapping[str, type[MaskRefiner]]:
    """The two refiners of this package."""
    from .decay import PositionDecay
    from .values import ValueWeights

    return {"position-decay": PositionDecay, "value-weights": ValueWeights}
