"""A model's anchor layers and maps of heads: what `sparseprefill anchors` and `fit` make for kascade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import asdict, field, frozen
from torch import Tensor

from sparseprefill import __version__
from sparseprefill.errors import ParameterError
from sparseprefill.profiles.anchors import AnchorTable
from sparseprefill.profiles.identity import ModelIdentity

from ..progress import Progress
from . import capture, choose

ONE_IN = 7
"""Layers to an anchor, about, where nobody says how many: 5 of 32, as the authors pick."""


@frozen(kw_only=True)
class Settings:
    """count: anchor layers, None for one in seven. tile: tokens of a query tile. columns: keys before a tile that are
    compared: the fewest that the method ever keeps, where a choice is hardest."""

    count: int | None = None
    tile: int = 128
    columns: int = 128

    def check(self, tokens: int) -> None:
        """ParameterError where samples of so many tokens are too short."""
        least = self.columns + self.tile
        if tokens <= least:
            raise ParameterError(
                f"the shortest prompt has {tokens} tokens: pass longer ones than {least}, or no tile has more keys "
                "before it than it keeps"
            )


@frozen(eq=False)
class Anchored:
    """The table, with what it was made from. layers: those that a method serves. gain: ``[n, n]``, what a layer, the
    column, has from the choice of an earlier one, the row, its weight included. scores: by number of anchors, the
    layers and their share of what all would have from themselves.
    """

    table: AnchorTable
    layers: tuple[int, ...]
    gain: Tensor = field(repr=False)
    scores: dict[int, tuple[tuple[int, ...], float]]


def anchored(
    model: Any,
    identity: ModelIdentity,
    samples: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress = lambda what, done, of: None,
) -> Anchored:
    """Let the model read samples densely, and choose its anchor layers.

    samples: token ids, longer than a tile with its columns. Raises ParameterError for shorter ones, and as
    `capture.readings` does.
    """
    settings.check(min(map(len, samples)))
    similar: dict[tuple[int, int], Tensor] = {}
    weight: dict[int, float] = {}
    for reading in capture.readings(model, samples, settings.tile, lambda done, of: progress("layers", done, of)):
        own = {layer: choose.TopKeys.of(sums, settings.columns) for layer, sums in reading.sums.items()}
        for a in own:
            for b in (layer for layer in own if layer >= a):
                share = choose.similarity(own[a], reading.sums[b], own[b]).double().cpu() / len(samples)
                similar[a, b] = similar.get((a, b), torch.zeros_like(share)) + share
        for layer in own:
            weight[layer] = weight.get(layer, 0.0) + reading.weight[layer] / len(samples)
    layers = tuple(sorted(weight))
    gain = choose.ordered(layers, similar, weight)
    count = -(-len(layers) // ONE_IN) if settings.count is None else min(settings.count, len(layers))
    whole = max(float(gain.diagonal().sum()), torch.finfo(torch.float64).tiny)
    scores = {}
    for k in range(1, min(max(8, count), len(layers)) + 1):
        chosen, value = choose.best(gain, k)
        scores[k] = (tuple(layers[i] for i in chosen), value / whole)
    anchors = scores[count][0]
    maps = {}
    for layer in layers:
        anchor = max(one for one in anchors if one <= layer)
        if anchor != layer:
            maps[layer] = choose.mapped(similar[anchor, layer])
    made = {
        **{"tokens": len(samples[0]), "samples": len(samples), **asdict(settings), "count": count},
        **{"score": round(scores[count][1], 4), "sparseprefill": __version__},
    }
    table = AnchorTable(anchors=anchors, maps=maps, model=identity, made=made)
    return Anchored(table, layers, gain, scores)
