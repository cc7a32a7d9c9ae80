"""What the cluster table says about one layer: known on the host, and as index tensors on the device."""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.clusters import NOISE, ClusterTable


@frozen
class LayerHeads:
    """The clusters of one layer's heads.

    cluster: of each head, NOISE where it can have no pivot. makes: whether a head may make its cluster's pivot. A head
    may where a later layer has heads of the cluster: a layer is decided in one wave, so only they could use the pivot.
    """

    cluster: tuple[int, ...]
    makes: tuple[bool, ...]

    @property
    def open(self) -> tuple[int, ...]:
        """Clusters whose pivot this layer may make."""
        return tuple(sorted({c for c, makes in zip(self.cluster, self.makes, strict=True) if makes}))

    def clusters(self, device: torch.device) -> Tensor:
        """int64 [H]: cluster of each head, 0 for noise."""
        return index(tuple(max(c, 0) for c in self.cluster), device)

    def members(self, device: torch.device) -> Tensor:
        """bool [H]: heads that belong to a cluster."""
        return index(tuple(int(c != NOISE) for c in self.cluster), device).bool()

    def makers(self, device: torch.device) -> Tensor:
        """bool [H]: heads that may make a pivot."""
        return index(tuple(map(int, self.makes)), device).bool()


@frozen
class Clusters:
    """The table in use, or, without one, a single cluster of all heads."""

    table: ClusterTable | None
    sharing: bool = True

    @property
    def count(self) -> int:
        """How many clusters there are."""
        return 1 if self.table is None else len(self.table.clusters)

    def layer(self, layer: int, heads: int) -> LayerHeads:
        """Of a layer with so many query heads."""
        if not self.sharing:
            return LayerHeads((NOISE,) * heads, (False,) * heads)
        if self.table is None:
            return LayerHeads((0,) * heads, (True,) * heads)
        spans = self._spans
        found = [self.table.label(layer, head) for head in range(heads)]
        found = [c if c != NOISE and spans[c][0] < spans[c][1] else NOISE for c in found]
        return LayerHeads(tuple(found), tuple(c != NOISE and layer < spans[c][1] for c in found))

    @cached_property
    def _spans(self) -> tuple[tuple[int, int], ...]:
        """First and last layer of each cluster."""
        layers = [[layer for layer, _ in heads] for heads in self.table.clusters] if self.table else []
        return tuple((min(one), max(one)) for one in layers)


@lru_cache(maxsize=4096)
def index(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n] on the device, kept: a copy in every call would make the host wait. Not to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
