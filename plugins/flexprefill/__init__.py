"""FlexPrefill: a pattern per head, query-aware or vertical-slash, each with its own budget (Lai et al., 2025)."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from sparseprefill.errors import ParameterError, printed
from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.validate import number, one_of, tokens, whole


def _ceiling(config: FlexConfig, attribute: Attribute[Any], value: Any) -> None:
    """integer >= min_budget, or None."""
    if value is None:
        return
    whole()(config, attribute, value)
    if value < config.min_budget:
        raise ParameterError(
            f"{attribute.name} is {printed(value)}: pass at least min_budget, {config.min_budget}, or None"
        )


@frozen(kw_only=True)
class FlexConfig:
    """Settings of `flexprefill`.

    gamma: share of the scores that the chosen tiles of a query-aware head, and the columns and diagonals each of
    another, must reach. tau: a head is query-aware where the Jensen-Shannon distance between estimated and true
    attention of the last block lies below; in nats, as the authors' release takes it: from 0 to sqrt(ln 2) = 0.833.
    block: tile size, number of representative queries, and width of a diagonal bin, in tokens. min_budget: least
    tokens, rounded up to whole blocks, of the tiles per query tile, of the columns, and of the diagonals. max_budget:
    most tokens of the same, or None. coverage: "row" takes gamma of each query tile's scores, "global" of the whole
    map's.
    """

    gamma: float = field(default=0.95, validator=number(0.0, 1.0))
    tau: float = field(default=0.1, validator=number(0.0))
    block: int = field(default=128, validator=tokens())
    min_budget: int = field(default=1024, validator=whole(0))
    max_budget: int | None = field(default=None, validator=_ceiling)
    coverage: str = field(default="row", validator=one_of("row", "global"))


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="flexprefill",
            summary="per head: tiles by pooled scores, or columns and diagonals of the last queries",
            paper="FlexPrefill: A Context-Aware Sparse Attention Mechanism (Lai et al., 2025), Algorithms 1-4",
            config=FlexConfig,
            build=Later(f"{__name__}.stages"),
            full={"gamma": 1.0},
            small={"gamma": 0.6, "tau": 0.2, "block": 16, "min_budget": 16},
            search={"gamma": (0.8, 0.9, 0.95, 0.98), "tau": (0.1, 0.2), "min_budget": (256, 1024)},
        )
    ]
