"""The plugin: one hook that offers one method. Nothing heavy is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill import Method, hookimpl

from .config import LastBlockConfig

if TYPE_CHECKING:
    from sparseprefill import Pipeline


def _build(config: LastBlockConfig) -> Pipeline:
    from .stages import pipeline

    return pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The methods of this package."""
    return [
        Method(
            name="last-block",
            summary="the key columns that the last queries look at, and a local band",
            config=LastBlockConfig,
            build=_build,
            full={"keep": 1 << 30},
            small={"keep": 24, "band": 32, "block": 16},
        )
    ]
