"""AnchorAttention: difference-aware stripe sparsity (Zhang et al., 2025)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import AnchorConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: AnchorConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="anchor-attention",
            summary="single key columns whose pooled logit comes near the row's anchor",
            paper="AnchorAttention: Difference-Aware Sparse Attention with Stripe Granularity (Zhang et al., 2025)",
            config=AnchorConfig,
            build=_build,
            full={"theta": math.inf},
            small={"theta": 1.0, "step": 2, "block": 16, "init_tokens": 16},
            search={"theta": (7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 15.0)},
        )
    ]
