"""FlexPrefill: a pattern per head, query-aware or vertical-slash, each with its own budget (Lai et al., 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import FlexConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: FlexConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="flexprefill",
            summary="per head: tiles by pooled scores, or columns and diagonals of the last queries",
            paper="FlexPrefill: A Context-Aware Sparse Attention Mechanism (Lai et al., 2025), Algorithms 1-4",
            config=FlexConfig,
            build=_build,
            full={"gamma": 1.0},
            small={"gamma": 0.6, "tau": 0.2, "block": 16, "min_budget": 16},
            search={"gamma": (0.8, 0.9, 0.95, 0.98), "tau": (0.1, 0.2), "min_budget": (256, 1024)},
        )
    ]
