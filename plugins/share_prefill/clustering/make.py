"""A model's heads, clustered: what `sparseprefill cluster` and `fit` make for share-prefill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from attrs import asdict
from torch import Tensor

from sparseprefill import __version__
from sparseprefill.profiles.table import MadeTable

from ..table import ClusterTable, Settings, Spot
from . import autoencoder, capture, group

if TYPE_CHECKING:
    from sparseprefill.profiles.progress import Progress
    from sparseprefill.profiles.table import ModelReader


def clustered(
    reader: ModelReader,
    samples: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress = lambda what, done, of: None,
) -> MadeTable:
    """Let the model read samples of one length densely, and cluster the block maps of its heads.

    samples: token ids. Raises UnsupportedCallError, AttachError or ParameterError as `capture.block_maps` does.
    """
    by_layer = capture.block_maps(reader, samples, settings.block, lambda done, of: progress("layers", done, of))
    heads = [(layer, head) for layer, maps in by_layer.items() for head in range(maps.shape[1])]
    maps = torch.cat(list(by_layer.values()), 1)
    codes, error_left = autoencoder.compress(
        maps.flatten(0, 1),
        latent=settings.latent,
        epochs=settings.epochs,
        seed=settings.seed,
        device=reader.device,
        progress=lambda done, of: progress("epochs", done, of),
    )
    chosen = group.labels(group.features(codes.unflatten(0, maps.shape[:2])), settings.threshold, settings.min_size)
    made = {"tokens": len(samples[0]), "samples": len(samples), **asdict(settings), "sparseprefill": __version__}
    table = group.table(heads, chosen, reader.identity, made)
    similar = torch.stack([group.similarity(one) for one in maps]).mean(0)
    within, across = _means(similar, chosen)
    rows = [(str(i), str(len(one)), _words(one)) for i, one in enumerate(table.clusters)]
    rows += [("noise", str(len(table.noise)), _words(table.noise))] if table.noise else []
    return MadeTable(
        table=table,
        measured=f"{len(heads)} heads",
        heads=("cluster", "heads", "layer.head"),
        rows=rows,
        words=("layer.head",),
        drop=("heads",),
        remarks=(f"similarity of the patterns: {within:.2f} within clusters, {across:.2f} across",),
        facts={
            **made,
            **{"clusters": table.clusters, "noise": table.noise, "restored_error": error_left},
            **{"similarity_within": within, "similarity_across": across},
        },
        draw=partial(_draw, similar, heads, table),
        useless="" if table.clusters else "no two heads of this model look alike",
    )


def _draw(similar: Tensor, heads: list[Spot], table: ClusterTable, path: Path) -> None:
    from .picture import draw

    draw(similar, heads, table, path)


def _means(similar: Tensor, chosen: list[int]) -> tuple[float, float]:
    """Mean similarity of two heads of one cluster, and of any other two; NaN where there are none."""
    label = torch.tensor(chosen)
    other = ~torch.eye(len(label), dtype=torch.bool)
    same = (label[:, None] == label) & (label >= 0) & other
    return float(similar[same].mean()), float(similar[~same & other].mean())


def _words(heads: Iterable[Spot]) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in heads)
