"""XAttention: block-sparse attention with antidiagonal scoring (Xu et al., 2025)."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.validate import MOST_TILE, flag, multiple_of, number, whole


@frozen(kw_only=True)
class XConfig:
    """Settings of `xattention`.

    stride: distance of the antidiagonals, and tokens per group, 8 or 16 in the paper. threshold: share of a query
    tile's scores that its key tiles must reach. block: tile size in tokens. sink: keep the first key tile of every row.
    """

    stride: int = field(default=16, validator=whole())
    threshold: float = field(default=0.9, validator=number(0.0, 1.0))
    block: int = field(default=128, validator=multiple_of("stride", MOST_TILE))
    sink: bool = field(default=True, validator=flag())


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="xattention",
            summary="tiles whose strided antidiagonals carry most of the softmax",
            paper="XAttention: Block Sparse Attention with Antidiagonal Scoring (Xu et al., 2025), Algorithm 1",
            config=XConfig,
            build=Later(f"{__name__}.stages"),
            full={"threshold": 1.0},
            small={"stride": 4, "threshold": 0.6, "block": 16},
            search={"threshold": (0.7, 0.8, 0.9, 0.95, 0.98), "stride": (8, 16)},
        )
    ]
