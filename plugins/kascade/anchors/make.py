"""A model's anchor layers and maps of heads: what `sparseprefill anchors` and `fit` make for kascade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import asdict
from torch import Tensor

from sparseprefill import __version__
from sparseprefill.profiles.table import MadeTable

from ..table import AnchorTable, Settings
from . import capture, choose

if TYPE_CHECKING:
    from sparseprefill.profiles.progress import Progress
    from sparseprefill.profiles.table import ModelReader

ONE_IN = 7
"""Layers to an anchor, about, where nobody says how many: 5 of 32, as the authors pick."""


def anchored(
    reader: ModelReader,
    samples: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress = lambda what, done, of: None,
) -> MadeTable:
    """Let the model read samples densely, and choose its anchor layers.

    samples: token ids, longer than a tile with its columns. Raises ParameterError for shorter ones, and as
    `capture.readings` does.
    """
    settings.check(min(map(len, samples)))
    similar: dict[tuple[int, int], Tensor] = {}
    weight: dict[int, float] = {}
    for reading in capture.readings(reader, samples, settings.tile, lambda done, of: progress("layers", done, of)):
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
    scores: dict[int, tuple[tuple[int, ...], float]] = {}
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
    table = AnchorTable(anchors=anchors, maps=maps, model=reader.identity, made=made)
    return MadeTable(
        table=table,
        measured=f"{len(layers)} layers",
        heads=("anchors", "layers", "score", ""),
        rows=[
            (str(k), " ".join(map(str, one)), f"{score:.3f}", "chosen" if one == anchors else "")
            for k, (one, score) in scores.items()
        ],
        words=("layers", ""),
        facts={
            **made,
            "anchors": anchors,
            "maps": maps,
            "scores": {k: {"anchors": one, "score": score} for k, (one, score) in scores.items()},
        },
    )
