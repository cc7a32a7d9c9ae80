"""Parameters of the classic methods."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.validate import number, whole


@frozen(kw_only=True)
class DenseConfig:
    """block: tile size in tokens."""

    block: int = field(default=128, validator=whole())


@frozen(kw_only=True)
class StreamingConfig:
    """Sink and window in tokens, rounded up to whole tiles.

    sink: first keys that every query sees. window: nearest keys that a query sees. block: tile size in tokens.
    """

    sink: int = field(default=1024, validator=whole(0))
    window: int = field(default=8192, validator=whole())
    block: int = field(default=128, validator=whole())


@frozen(kw_only=True)
class VerticalSlashConfig:
    """gamma: share of the sampled mass that columns, and diagonals, each must reach.

    block: tile size, number of sampled last queries, and width of a diagonal bin, in tokens.
    """

    gamma: float = field(default=0.9, validator=number(0.0, 1.0))
    block: int = field(default=128, validator=whole())
