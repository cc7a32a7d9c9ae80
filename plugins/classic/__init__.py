"""Dense, streaming and vertical-slash attention: the baselines that papers compare against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseprefill.method import Method, hookimpl

from .config import DenseConfig, StreamingConfig, VerticalSlashConfig

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline


def _dense(config: DenseConfig) -> Pipeline:
    from . import stages

    return stages.dense(config)


def _streaming(config: StreamingConfig) -> Pipeline:
    from . import stages

    return stages.streaming(config)


def _vertical_slash(config: VerticalSlashConfig) -> Pipeline:
    from . import vertical_slash

    return vertical_slash.pipeline(config)


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The baselines."""
    return [
        Method(
            name="dense",
            summary="every causal key, through the sparse executor",
            config=DenseConfig,
            build=_dense,
            small={"block": 16},
        ),
        Method(
            name="streaming",
            summary="attention sinks and a local window",
            paper="StreamingLLM (Xiao et al., 2024)",
            config=StreamingConfig,
            build=_streaming,
            full={"window": 1 << 30},
            small={"sink": 16, "window": 32, "block": 16},
        ),
        Method(
            name="vertical-slash",
            summary="columns and diagonals with most of the last queries' attention mass",
            paper="MInference (Jiang et al., 2024); SharePrefill, Algorithm 5",
            config=VerticalSlashConfig,
            build=_vertical_slash,
            full={"gamma": 1.0},
            small={"gamma": 0.6, "block": 16},
            search={"gamma": (0.7, 0.8, 0.9, 0.95, 0.98, 0.99)},
        ),
    ]
