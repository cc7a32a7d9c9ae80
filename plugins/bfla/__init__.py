"""BFLA: Block-Filtered Long-Context Attention (Wu et al., 2026)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import BflaConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: BflaConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="bfla",
            summary="blocks with most of the mass of pooled scores, and tiles rescued around them",
            paper="BFLA: Block-Filtered Long-Context Attention Mechanism (Wu et al., 2026)",
            config=BflaConfig,
            build=_build,
            full={"keep_mass": 1.0},
            small={
                "block": 32,
                "group": 8,
                "tile": 16,
                "keep_mass": 0.7,
                "score_norm": "mean",
                "local_tiles": 1,
                "stride": 5,
                "random": 0.05,
            },
            search={"keep_mass": (0.8, 0.9, 0.95, 0.98, 0.99, 0.995), "group": (4, 8, 16, 32, 64)},
        )
    ]
