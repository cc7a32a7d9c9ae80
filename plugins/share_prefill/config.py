"""Parameters of SharePrefill, as the paper names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import Attribute, field, frozen

from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.table import NeededTable
from sparseprefill.validate import number, one_of, whole

from .table import ClusterTable, Settings, parse

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.profiles.progress import Progress
    from sparseprefill.profiles.table import MadeTable, ModelReader
    from sparseprefill.route import Route
    from sparseprefill.stages import PatternEstimator

SINGLE = "single"
"""The value of `clusters` that needs no table: all heads of all layers are one cluster."""


def _make(reader: ModelReader, samples: Sequence[Sequence[int]], settings: Settings, progress: Progress) -> MadeTable:
    from .clustering.make import clustered

    return clustered(reader, samples, settings, progress)


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
    make=_make,
    settings=Settings,
    picture=True,
    needs={"scipy": "sparseprefill[cluster]"},
)


def _inner_table(value: Any) -> Any:
    return MappingProxyType(dict(value)) if isinstance(value, Mapping) else value


def _inner(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """method name, table, or none"""
    if value is None or isinstance(value, str | Mapping):
        return
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.route import Route
    from sparseprefill.stages import PatternEstimator, missing

    if isinstance(value, Pipeline | Route):
        return
    if isinstance(value, type) or missing(value, PatternEstimator):
        wanted = "a method's name, a table as of sparseprefill.from_config, a Pipeline, an estimator, or None"
        raise ParameterError(f"{attribute.name} is {printed(value)}: pass {wanted}")


@frozen(kw_only=True)
class ShareConfig:
    """Settings of `share-prefill`, and of the stage `Share`.

    gamma: share of the attention that a pivot's tiles, and vertical-slash's columns and diagonals, must reach. tau: a
    head shares its cluster's pivot where their distance (JS, 0 to 1) is below; 0 switches sharing off. delta: a head
    whose distance to the uniform distribution is not below is very sparse and takes vertical-slash; above 1 no head
    is. block: tile size and number of sampled last queries, in tokens. clusters: the table of clusters, as the path of
    a JSON file or a mapping; 'single' puts all heads into one. Without one the method refuses to run. block_score:
    'mass' scores a block by its exact attention, 'mean_qk' by the softmax of its mean logit. coverage: gamma holds for
    each 'row' of blocks, or is 'global' for the map of a head. inner: the method of heads that neither share a pivot
    nor make one, by name, as a table of `from_config`, or from Python as a pipeline or an estimator; None:
    vertical-slash with this gamma and block, from the queries that are sampled anyway.
    """

    gamma: float = field(default=0.9, validator=number(0.0, 1.0))
    tau: float = field(default=0.2, validator=number(0.0))
    delta: float = field(default=0.3, validator=number(0.0))
    block: int = field(default=128, validator=whole())
    clusters: Any = field(default=None, **TABLE.field)
    block_score: str = field(default="mass", validator=one_of("mass", "mean_qk"))
    coverage: str = field(default="row", validator=one_of("row", "global"))
    inner: str | Mapping[str, Any] | Pipeline | Route | PatternEstimator | None = field(
        default=None, converter=_inner_table, validator=_inner
    )
