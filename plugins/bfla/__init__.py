"""BFLA: Block-Filtered Long-Context Attention (Wu et al., 2026)."""

from __future__ import annotations

from attrs import field, frozen

from sparseprefill.errors import ParameterError
from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.validate import flag, maybe, number, one_of, tokens, whole


@frozen(kw_only=True)
class BflaConfig:
    """Settings of `bfla`; sizes in tokens.

    block: b, query and key tokens per block. group: g, tokens flattened into one vector; divides the block.
    keep_mass: gamma, share of a block row's softmax mass that is kept. score_norm: "sum" scores a pair of groups by the
    sum of its g dot products, as the paper does, "mean" by their mean. local_tiles: n_local, tiles kept before the
    diagonal. sink_tiles: first tiles kept. stride: eta, keeps every eta-th tile; None for none. random: rho, share of
    tiles kept at random. seed: s, of stride and random. tile: T, tile of mask and rescues; divides the block.
    gqa_union: one mask for the query heads of a KV head.

    Raises ParameterError where group or tile do not divide the block.
    """

    block: int = field(default=256, validator=tokens())
    group: int = field(default=64, validator=whole())
    keep_mass: float = field(default=0.99, validator=number(0.0, 1.0))
    score_norm: str = field(default="sum", validator=one_of("sum", "mean"))
    local_tiles: int = field(default=8, validator=whole(0))
    sink_tiles: int = field(default=1, validator=whole(0))
    stride: int | None = field(default=16, validator=maybe(whole()))
    random: float = field(default=0.0, validator=number(0.0, 1.0))
    seed: int = field(default=0, validator=whole(0, 2**63 - 1))
    tile: int = field(default=128, validator=tokens())
    gqa_union: bool = field(default=False, validator=flag())

    def __attrs_post_init__(self) -> None:
        for name in ("group", "tile"):
            part = getattr(self, name)
            if self.block % part:
                raise ParameterError(f"{name} is {part}: block {self.block} must be a multiple of it")


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="bfla",
            summary="blocks with most of the mass of pooled scores, and tiles rescued around them",
            paper="BFLA: Block-Filtered Long-Context Attention Mechanism (Wu et al., 2026)",
            config=BflaConfig,
            build=Later(f"{__name__}.stages"),
            full={"keep_mass": 1.0},
            small={
                "block": 32,
                "group": 8,
                "tile": 16,
                "keep_mass": 0.7,
                "score_norm": "mean",
                "local_tiles": 1,
                "stride": 5,
                "random": 0.05,
            },
            search={"keep_mass": (0.8, 0.9, 0.95, 0.98, 0.99, 0.995), "group": (4, 8, 16, 32, 64)},
        )
    ]
