"""Shares of maxima: block-sparse attention in which no query row is averaged away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import RowMaxConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: RowMaxConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="rowmax",
            summary="tiles to which single query rows give a large enough share",
            config=RowMaxConfig,
            build=_build,
            full={"eps": 0.0},
            small={"eps": 0.05, "every": 2, "block": 16},
            search={"eps": (0.005, 0.01, 0.02, 0.05, 0.1)},
        )
    ]
