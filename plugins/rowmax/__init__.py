"""Shares of maxima: block-sparse attention in which no query row is averaged away."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from sparseprefill.errors import ParameterError, printed
from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.validate import LONGEST, MOST_TILE, flag, is_whole, multiple_of, number, one_of, whole


def _columns(config: RowMaxConfig, attribute: Attribute[Any], value: Any) -> None:
    """a power of two that divides block, or none for tiles"""
    if value is None:
        return
    fits = is_whole(value, 1) and not value & (value - 1)
    if not fits or config.block % value:
        shown = f"block, {config.block}" if fits else "block"
        remedy = f"pass a power of two that divides {shown}, or None for tiles of block keys"
        raise ParameterError(f"{attribute.name} is {printed(value)}: {remedy}")


@frozen(kw_only=True)
class RowMaxConfig:
    """Settings of `rowmax`.

    eps: a column is kept whose largest logit has this share of a row, such as 0.005 for half a percent; 0 keeps
    everything. times: a column is also kept at so many times the mean share, such as 3/2048 in a row of 2,048 columns
    with 3; 1e9 leaves the choice to eps, and eps=1 leaves it to times. every: one query row in so many is looked at, by
    each head, or under a union by one head of the KV group; 1 looks at all. block: rows of a query tile, and keys of a
    tile, in tokens. width: keys of a column, such as 16, a power of two that divides `block`; None for columns as wide
    as tiles. sink: keep the first key tile of every row. union: "head" keeps for each query head alone; "group" gives
    all heads of a KV head what any of them keeps, so that they share the rows to be looked at. strong: with "head", a
    column that has this share of a row of one head is kept for all query heads of the KV head; 0 shares every column
    that is kept, 1 none. precision: of the logits that are looked at: "exact", in the call's type, which drops no
    column in which such a row gives a key that share of its softmax; "fp8", which needs an NVIDIA GPU with 8-bit tensor
    cores and drops a few of those; or "auto", which is fp8 where that can be and exact elsewhere.
    """

    eps: float = field(default=0.005, validator=number(0.0, 1.0))
    times: float = field(default=3.0, validator=number(0.0, LONGEST))
    every: int = field(default=8, validator=whole())
    block: int = field(default=128, validator=multiple_of("every", MOST_TILE))
    width: int | None = field(default=16, validator=_columns)
    sink: bool = field(default=True, validator=flag())
    union: str = field(default="head", validator=one_of("head", "group"))
    strong: float = field(default=0.03, validator=number(0.0, 1.0))
    precision: str = field(default="auto", validator=one_of("auto", "exact", "fp8"))

    @property
    def everything(self) -> bool:
        """True if no column is dropped."""
        return min(self.eps, self.times) <= 0.0

    @property
    def shares_strong(self) -> bool:
        """True if heads that keep alone share columns to which one of them gives a strong share."""
        return self.union == "head" and self.strong < 1.0

    @property
    def column(self) -> int:
        """Keys of what is kept or dropped whole."""
        return self.block if self.width is None else self.width


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="rowmax",
            summary="columns of keys to which single query rows give a large enough share",
            config=RowMaxConfig,
            build=Later(f"{__name__}.stages"),
            full={"eps": 0.0},
            small={"eps": 0.05, "every": 2, "block": 16, "width": 4},
            search={"times": (1.5, 2.0, 3.0, 4.5, 6.0), "eps": (0.005, 0.02)},
        )
    ]
