"""SampleAttention: adaptive structured sparse attention from sampled queries (Zhu et al., 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import SampleConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: SampleConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="sample-attention",
            summary="blocks of columns and diagonals with most of the mass of rows sampled along the prompt",
            paper="SampleAttention: Near-Lossless Acceleration of Long Context LLM Inference with Adaptive Structured "
            "Sparse Attention (Zhu et al., 2024)",
            config=SampleConfig,
            build=_build,
            full={"alpha_c": 1.0},
            small={"alpha_c": 0.5, "alpha_s": 0.5, "chunk_n": 2, "block": 16},
            search={
                "alpha_c": (0.8, 0.85, 0.9, 0.95, 0.98),
                "alpha_s": (0.8, 0.85, 0.9, 0.95, 0.98),
                "chunk_n": (1, 2, 4),
            },
        )
    ]
