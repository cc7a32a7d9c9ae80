"""Proxies: each key tile that a mask leaves out enters the output once, through its mean key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparseprefill.method import hookimpl

if TYPE_CHECKING:
    from sparseprefill.stages import Corrector


@hookimpl
def sparseprefill_correctors() -> Mapping[str, type[Corrector]]:
    """The one corrector of this package."""
    from .corrector import Proxy

    return {"proxy": Proxy}
