"""One layer's row of the cluster table: known on the host, and as index tensors on the device."""

from __future__ import annotations

from functools import cached_property

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.statistics.kept import remembered

from .table import NOISE, ClusterTable

NEVER = 2**31 - 1
"""Layer of a pivot that no head has run dense for."""


@frozen
class LayerHeads:
    """The clusters of one layer's heads.

    cluster: of each head, NOISE where it can have no pivot. makes: whether a head may make its cluster's pivot. A head
    may where a later layer has heads of the cluster: a layer is decided in one wave, so only they could use the pivot.
    """

    cluster: tuple[int, ...]
    makes: tuple[bool, ...]

    @cached_property
    def open(self) -> tuple[int, ...]:
        """Clusters whose pivot this layer may make."""
        return tuple(sorted({c for c, makes in zip(self.cluster, self.makes, strict=True) if makes}))

    @cached_property
    def _codes(self) -> tuple[int, ...]:
        labels = zip(self.cluster, self.makes, strict=True)
        return tuple(NOISE if c == NOISE else 2 * c + makes for c, makes in labels)

    def codes(self, device: torch.device) -> Tensor:
        """int64 [H]: twice the cluster of each head, plus one where it may make the pivot; -1 for noise."""
        return index(self._codes, device)

    def dense(self, dense: Tensor) -> tuple[Tensor, Tensor]:
        """The head of each open cluster that is in `dense`, bool ``[B, H]``: int64 ``[B, S]``, and whether one is."""
        mine = self.codes(dense.device) // 2 == index(self.open, dense.device)[:, None]  # noise is in no cluster
        chosen = dense[:, None] & mine
        return chosen.to(torch.uint8).argmax(-1), chosen.any(-1)


@frozen
class Clusters:
    """The table in use, or, without one, a single cluster of all heads."""

    table: ClusterTable | None
    sharing: bool = True
    _layers: dict[tuple[int, int, int], LayerHeads] = field(factory=dict, init=False, eq=False, repr=False)

    @property
    def count(self) -> int:
        """The number of clusters."""
        return 1 if self.table is None else len(self.table.clusters)

    def layer(self, layer: int, heads: int, first: int = 0) -> LayerHeads:
        """The clusters of so many query heads of a layer, from the head `first` on."""
        key = (layer, heads, first)
        if key not in self._layers:
            self._layers[key] = self._found(layer, range(first, first + heads))
        return self._layers[key]

    def _found(self, layer: int, heads: range) -> LayerHeads:
        if not self.sharing:
            return LayerHeads((NOISE,) * len(heads), (False,) * len(heads))
        if self.table is None:
            return LayerHeads((0,) * len(heads), (True,) * len(heads))
        spans = self.table.spans
        found = [self.table.label(layer, head) for head in heads]
        found = [c if c != NOISE and spans[c][0] < spans[c][1] else NOISE for c in found]
        return LayerHeads(tuple(found), tuple(c != NOISE and layer < spans[c][1] for c in found))


def of_heads(x: Tensor, head: Tensor) -> Tensor:
    """x ``[B, H, *]`` at head ``[B, S]``: ``[B, S, *]``."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], head]


@remembered(4096)
def index(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n] on the device, kept: a copy in every call would make the host wait. Not to be written to.

    The host waits for the one copy that there is, so that any CUDA stream may read it.
    """
    return torch.tensor(values, dtype=torch.int64, device=device)
