"""Parameters, with defaults and bounds."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.validate import whole


@frozen(kw_only=True)
class LastBlockConfig:
    """Settings of `last-block`, all in tokens.

    keep: key columns that every query sees, per head. band: nearest keys that a query sees, rounded up to whole tiles.
    block: tile size and number of sampled last queries.
    """

    keep: int = field(default=1024, validator=whole(0))
    band: int = field(default=1024, validator=whole())
    block: int = field(default=128, validator=whole())
