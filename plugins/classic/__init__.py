"""Dense, streaming and vertical-slash attention: the baselines that papers compare against."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.validate import number, tokens, whole

STAGES = f"{__name__}.stages"


@frozen(kw_only=True)
class DenseConfig:
    """block: tile size in tokens."""

    block: int = field(default=128, validator=tokens())


@frozen(kw_only=True)
class StreamingConfig:
    """Sink and window in tokens, rounded up to whole tiles.

    sink: first keys that every query sees. window: nearest keys that a query sees. block: tile size in tokens.
    """

    sink: int = field(default=1024, validator=whole(0))
    window: int = field(default=8192, validator=whole())
    block: int = field(default=128, validator=tokens())


@frozen(kw_only=True)
class VerticalSlashConfig:
    """gamma: share of the sampled mass that columns, and diagonals, each must reach.

    block: tile size, number of sampled last queries, and width of a diagonal bin, in tokens.
    """

    gamma: float = field(default=0.9, validator=number(0.0, 1.0))
    block: int = field(default=128, validator=tokens())


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The baselines."""
    return [
        Method(
            name="dense",
            summary="every causal key, through the sparse executor",
            config=DenseConfig,
            build=Later(STAGES, "dense"),
            full={},
            small={"block": 16},
        ),
        Method(
            name="streaming",
            summary="attention sinks and a local window",
            paper="StreamingLLM (Xiao et al., 2024)",
            config=StreamingConfig,
            build=Later(STAGES, "streaming"),
            full={"window": 1 << 30},
            small={"sink": 16, "window": 32, "block": 16},
        ),
        Method(
            name="vertical-slash",
            summary="columns and diagonals with most of the last queries' attention mass",
            paper="MInference (Jiang et al., 2024); SharePrefill, Algorithm 5",
            config=VerticalSlashConfig,
            build=Later(STAGES, "vertical_slash"),
            full={"gamma": 1.0},
            small={"gamma": 0.6, "block": 16},
            search={"gamma": (0.7, 0.8, 0.9, 0.95, 0.98, 0.99)},
        ),
    ]
