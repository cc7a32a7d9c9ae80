"""Who is compared, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from attrs import field, frozen

from sparseprefill.mask.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.route import Route


@frozen
class Contender:
    """A pipeline under a name, with the parameters that made it; pipeline None is the stock model."""

    name: str
    pipeline: Pipeline | Route | None = None
    parameters: Mapping[str, Any] = field(factory=dict)

    @property
    def label(self) -> str:
        """The name to show."""
        return self.name if self.pipeline is not None else f"dense ({self.name})"


@frozen
class Layer:
    """One layer: pairs computed over causal pairs, and the recall of each head, averaged over the sampled rows.

    reason: why the layer ran dense, empty where it ran sparse.
    """

    index: int
    density: float
    recalls: tuple[float, ...]
    reason: str = ""


@frozen
class Outcome:
    """What one contender did.

    tokens: that were prefilled. families: values right and asked. seconds: of the prefill. mask: of the one head that
    was asked for, None where the layer ran dense. error: what stopped the contender; the other figures are then empty.
    """

    contender: Contender
    tokens: int = 0
    families: Mapping[str, tuple[int, int]] = field(factory=dict)
    seconds: float = 0.0
    layers: tuple[Layer, ...] = ()
    mask: SparseMask | None = None
    error: str = ""

    @property
    def right(self) -> int:
        """Values that were right."""
        return sum(right for right, _ in self.families.values())

    @property
    def asked(self) -> int:
        """Values that were asked."""
        return sum(asked for _, asked in self.families.values())

    @property
    def density(self) -> float:
        """Pairs computed over causal pairs, averaged over the layers; a layer that ran dense counts as 1."""
        return fmean(layer.density for layer in self.layers) if self.layers else 1.0

    @property
    def recall(self) -> float:
        """Attention mass kept, averaged over layers, heads and sampled rows."""
        return fmean(one for layer in self.layers for one in layer.recalls) if self.layers else 1.0

    @property
    def lowest(self) -> float:
        """Recall of the head that keeps least."""
        return min((one for layer in self.layers for one in layer.recalls), default=1.0)
