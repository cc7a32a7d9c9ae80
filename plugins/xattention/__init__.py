"""XAttention: block-sparse attention with antidiagonal scoring (Xu et al., 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import XConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: XConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="xattention",
            summary="tiles whose strided antidiagonals carry most of the softmax",
            paper="XAttention: Block Sparse Attention with Antidiagonal Scoring (Xu et al., 2025), Algorithm 1",
            config=XConfig,
            build=_build,
            full={"threshold": 1.0},
            small={"stride": 4, "threshold": 0.6, "block": 16},
            search={"threshold": (0.7, 0.8, 0.9, 0.95, 0.98), "stride": (8, 16)},
        )
    ]
