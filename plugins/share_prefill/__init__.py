"""SharePrefill: heads that look alike share the exact pattern of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from sparseprefill.method import Later, Method, a_method, hookimpl, method_table
from sparseprefill.profiles.table import NeededTable
from sparseprefill.validate import number, tokens

from .table import ClusterTable, Settings, parse

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.stages import PatternEstimator

SINGLE = "single"
"""The value of `clusters` that needs no table: all heads of all layers are one cluster."""


TABLE = NeededTable(
    parameter="clusters",
    kind=ClusterTable,
    parse=parse,
    words=(SINGLE,),
    forms="path, mapping, 'single', or none",
    stand_in={"clusters": SINGLE},
    command="cluster",
    summary="""Cluster the attention heads of a model for share-prefill.

    The model reads samples with dense attention. An autoencoder compresses the block maps of its heads, and heads with
    similar maps are clustered.
    """,
    of="heads",
    make=Later(f"{__name__}.clustering", "clustered"),
    settings=Settings,
    needs={"scipy": "scipy"},
)


@frozen(kw_only=True)
class ShareConfig:
    """Settings of `share-prefill`, and of the stage `Share`.

    gamma: share of the attention that a pivot's tiles, and vertical-slash's columns and diagonals, must reach. tau: a
    head shares its cluster's pivot where their distance (JS, 0 to 1) is below; 0 switches sharing off. delta: a head
    whose distance to the uniform distribution is not below is very sparse and takes vertical-slash; above 1 no head
    is. block: tile size and number of sampled last queries, in tokens. clusters: the table of clusters, as the path of
    a JSON file or a mapping; 'single' puts all heads into one. Without one the method refuses to run. inner: the method
    of heads that neither share a pivot nor make one, by name, as a table of `from_config`, or from Python as a pipeline
    or an estimator; None: vertical-slash with this gamma and block, from the queries that are sampled anyway.
    """

    gamma: float = field(default=0.9, validator=number(0.0, 1.0))
    tau: float = field(default=0.2, validator=number(0.0))
    delta: float = field(default=0.3, validator=number(0.0))
    block: int = field(default=128, validator=tokens())
    clusters: Any = field(default=None, **TABLE.field)
    inner: str | Mapping[str, Any] | Pipeline | PatternEstimator | None = field(
        default=None, converter=method_table, validator=a_method
    )


@hookimpl
def sparseprefill_methods() -> list[Method]:
    """The one method of this package."""
    return [
        Method(
            name="share-prefill",
            summary="the block pattern of a dense head, shared by heads of its cluster; vertical-slash elsewhere",
            paper="SharePrefill: Accelerating Prefilling for Long-Context LLMs via Sparse Pattern Sharing "
            "(Peng et al., 2025)",
            config=ShareConfig,
            build=Later(f"{__name__}.stages"),
            full={"clusters": SINGLE, "gamma": 1.0},
            # Random tensors are far from sparse: with the paper's delta most heads would count as ordinary ones.
            small={"clusters": SINGLE, "gamma": 0.6, "tau": 0.3, "delta": 0.5, "block": 16},
            search={"gamma": (0.8, 0.9, 0.95), "tau": (0.1, 0.2), "delta": (0.3, 1.01)},
            table=TABLE,
        )
    ]
