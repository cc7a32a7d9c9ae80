"""Delta Attention's correction (arXiv 2505.11254): what dense rows change is given to the rows behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparseprefill.method import hookimpl

if TYPE_CHECKING:
    from sparseprefill.stages import Corrector


@hookimpl
def sparseprefill_correctors() -> Mapping[str, type[Corrector]]:
    """The one corrector of this package."""
    from .corrector import Delta

    return {"delta": Delta}
