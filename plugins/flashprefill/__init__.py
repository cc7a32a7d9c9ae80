"""FlashPrefill's threshold as a refiner: tiles near the best of their row stay (arXiv 2603.06199)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparseprefill.method import hookimpl

if TYPE_CHECKING:
    from sparseprefill.stages import MaskRefiner


@hookimpl
def sparseprefill_refiners() -> Mapping[str, type[MaskRefiner]]:
    """The one refiner of this package."""
    from .threshold import RelativeThreshold

    return {"relative-threshold": RelativeThreshold}
