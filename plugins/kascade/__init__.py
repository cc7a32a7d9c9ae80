"""Kascade: few layers choose keys exactly, the layers behind them take that choice."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from sparseprefill.method import Later, Method, hookimpl
from sparseprefill.profiles.table import NeededTable
from sparseprefill.validate import maybe, number, tokens, whole

from .table import AnchorTable, Settings, parse

TABLE = NeededTable(
    parameter="anchors",
    kind=AnchorTable,
    parse=parse,
    forms="path, table, layers, or none",
    stand_in={"anchors": [0, 2, 8, 13, 14]},  # the authors' choice for Llama-3.1-8B
    command="anchors",
    summary="""Choose the anchor layers of a model for kascade.

    The model reads samples with dense attention. The keys that each layer would keep are compared with the attention of
    all later layers.
    """,
    of="layers",
    make=Later(f"{__name__}.anchors", "anchored"),
    settings=Settings,
    tokens=2048,
    samples=8,
)


@frozen(kw_only=True)
class KascadeConfig:
    """Settings of `kascade`.

    anchors: the table of anchor layers and maps of heads, as the path of a JSON file or its content; or the indices of
    the anchor layers, whose followers then go head by head. Without one the method refuses to run. topk: share of the
    keys before a tile that it keeps. least: a tile keeps at least so many, and a multiple of it. tile: queries that
    keep the same keys, in tokens. sampled: rows of each tile whose attention is summed in anchor layers, evenly spread;
    None: all. dense_layers: so many first layers keep every key; those of them that are anchors choose for the layers
    behind all the same.
    """

    anchors: Any = field(default=None, **TABLE.field)
    topk: float = field(default=0.1, validator=number(0.0, 1.0))
    least: int = field(default=128, validator=whole())
    tile: int = field(default=128, validator=tokens())
    sampled: int | None = field(default=64, validator=maybe(whole()))
    dense_layers: int = field(default=1, validator=whole(0))


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="kascade",
            summary="columns with most attention, chosen in a few anchor layers and reused by the layers after them",
            paper="Kascade: A Practical Sparse Attention Method for Long-Context LLM Inference (arXiv 2512.16391)",
            config=KascadeConfig,
            build=Later(f"{__name__}.stages"),
            full={"anchors": (0,), "topk": 1.0},
            small={
                **{"anchors": (0,), "topk": 0.2, "least": 8, "tile": 16},
                **{"sampled": 4, "dense_layers": 0},
            },
            search={"topk": (0.02, 0.05, 0.1, 0.2), "sampled": (16, 32, 64)},
            table=TABLE,
        )
    ]
