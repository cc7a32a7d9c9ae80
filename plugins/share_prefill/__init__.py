"""SharePrefill: heads that look alike share the exact pattern of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import SINGLE, TABLE, ShareConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: ShareConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="share-prefill",
            summary="the block pattern of a dense head, shared by heads of its cluster; vertical-slash elsewhere",
            paper="SharePrefill: Accelerating Prefilling for Long-Context LLMs via Sparse Pattern Sharing "
            "(Peng et al., 2025)",
            config=ShareConfig,
            build=_build,
            full={"clusters": SINGLE, "gamma": 1.0},
            # Random tensors are far from sparse: with the paper's delta most heads would count as ordinary ones.
            small={"clusters": SINGLE, "gamma": 0.6, "tau": 0.3, "delta": 0.5, "block": 16},
            search={"gamma": (0.8, 0.9, 0.95), "tau": (0.1, 0.2), "delta": (0.3, 1.01)},
            table=TABLE,
        )
    ]
