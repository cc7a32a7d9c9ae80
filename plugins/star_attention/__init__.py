"""Star Attention: anchored context blocks, then global attention for the query (Acharya et al., 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import StarConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: StarConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="star-attention",
            summary="context blocks that see the first block and themselves; the query sees everything",
            paper="Star Attention: Efficient LLM Inference over Long Sequences (Acharya et al., 2024)",
            config=StarConfig,
            build=_build,
            full={"block_size": 1 << 30},
            small={"block_size": 32, "anchor_length": 16, "tile": 16},
        )
    ]
