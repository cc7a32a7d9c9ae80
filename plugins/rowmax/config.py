"""Parameters of the row-wise estimate."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.validate import flag, number, whole


@frozen(kw_only=True)
class RowMaxConfig:
    """Settings of `rowmax`.

    eps: least share of a row's softmax that a single key of a tile must have for the tile to be kept; 0 keeps
    everything. every: one query row in so many is looked at; 1 looks at all. block: tile size in tokens. sink: keep the
    first key tile of every row.
    """

    eps: float = field(default=0.02, validator=number(0.0, 1.0))
    every: int = field(default=4, validator=whole())
    block: int = field(default=128, validator=whole())
    sink: bool = field(default=True, validator=flag())
