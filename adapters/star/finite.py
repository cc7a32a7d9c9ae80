"""Whether what every rank computed was finite: noted on the device layer by layer, read where a token is read anyway.

NaN of one rank is in the merged output of all, and from there on everywhere. So of a forward pass the first layer
counts, and in it the ranks whose own part was not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from attrs import define, field
from torch import Tensor

from .exchange import largest
from .ranks import RankError

if TYPE_CHECKING:
    from .executor import Shard
    from .ranks import Ranks


@define(eq=False)
class Finite:
    """What the layers of phase 2 noted since the last look, and the scores of the last token."""

    ranks: Ranks
    _layers: list[int] = field(factory=list, init=False)
    _noted: list[Tensor] = field(factory=list, init=False)
    _scores: Tensor | None = field(default=None, init=False)

    def note(self, layer: int, sizes: Tensor) -> None:
        """Keep `Merged.largest` of a layer, ``[R]``; on the device."""
        self._layers.append(layer)
        self._noted.append(sizes)

    def scores(self, scores: Tensor) -> None:
        """Keep whether scores ``[B, vocabulary]`` of rank 0, which all go by, hold NaN; on the device."""
        self._scores = scores.amax()

    def check(self) -> None:
        """Read it: RankError, the same on every rank, with the ranks and the layer. Waits for the device once."""
        layers, noted, scores = self._layers, self._noted, self._scores
        self._layers, self._noted, self._scores = [], [], None
        if not noted:
            return
        last = noted[-1].new_zeros(1) if scores is None else torch.isnan(scores)[None].to(noted[-1])
        *sizes, nan = torch.cat([*(x.to(last.device) for x in noted), last]).cpu().split(self.ranks.size)
        at = first_bad(torch.stack(sizes))
        if at is not None:
            self._raise(f"attention is not finite (NaN or infinity) in layer {layers[at[0]]} of phase 2", at[1])
        if bool(nan):
            self._raise("the scores of the next token hold NaN", [0])

    def check_shards(self, shards: Mapping[int, Shard], layers: list[int], device: torch.device) -> None:
        """Whether the keys and values that every rank holds after phase 1 are finite: RankError as of `check`.

        All ranks meet here, and none goes on before all are done: what failed on a device is told here, too.
        """
        mine = torch.zeros(len(layers), device=device)
        for place, layer in enumerate(layers):
            if layer in shards:
                k, v = (largest(x[None])[0] for x in (shards[layer].k, shards[layer].v))
                mine[place] = torch.maximum(k, v)
        at = first_bad(self.ranks.gather(mine).cpu().T)
        if at is not None:
            self._raise(
                f"keys or values of layer {layers[at[0]]} are not finite (NaN or infinity) after phase 1", at[1]
            )

    def _raise(self, what: str, ranks: list[int]) -> None:
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        raise RankError(self.ranks.tell(f"{who}: {what}"))


def first_bad(sizes: Tensor) -> tuple[int, list[int]] | None:
    """Of sizes ``[layers, R]`` on the host: the first layer with one that is not finite, and its ranks."""
    bad = ~torch.isfinite(sizes)
    if not bool(bad.any()):
        return None
    layer = int(bad.any(1).nonzero()[0])
    return layer, bad[layer].nonzero()[:, 0].tolist()
