"""Kascade: few layers choose keys exactly, the layers behind them take that choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import TABLE, KascadeConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: KascadeConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="kascade",
            summary="columns with most attention, chosen in a few anchor layers and reused by the layers after them",
            paper="Kascade: A Practical Sparse Attention Method for Long-Context LLM Inference (arXiv 2512.16391)",
            config=KascadeConfig,
            build=_build,
            full={"anchors": (0,), "topk": 1.0},
            small={
                **{"anchors": (0,), "topk": 0.2, "least": 8, "tile": 16},
                **{"sampled": 4, "dense_layers": 0},
            },
            search={"topk": (0.02, 0.05, 0.1, 0.2), "sampled": (16, 32, 64)},
            table=TABLE,
        )
    ]
