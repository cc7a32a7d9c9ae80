"""Skip-softmax (BLASST): every key tile is looked at, and those whose logits cannot matter are not finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import SkipSoftmaxConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _build(config: SkipSoftmaxConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="skip-softmax",
            summary="looks at every key tile, and skips those whose logits cannot matter while attention runs",
            paper="BLASST (arXiv 2512.12087)",
            config=SkipSoftmaxConfig,
            build=_build,
            full={"skip_below": 0.0},
            small={"skip_below": 60.0, "block": 16},
            search={"skip_below": (20.0, 100.0, 300.0, 600.0, 1200.0, 2500.0, 5000.0, 10000.0)},
        )
    ]
