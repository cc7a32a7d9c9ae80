"""A model's heads, clustered: what `sparseprefill cluster` and `fit` make for share-prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import asdict, field, frozen
from torch import Tensor

from sparseprefill import __version__
from sparseprefill.profiles.clusters import ClusterTable
from sparseprefill.profiles.identity import ModelIdentity

from ..progress import Progress
from . import autoencoder, capture, group


@frozen(kw_only=True)
class Settings:
    """block: tokens of a block of the maps. threshold: distance up to which heads are one cluster. min_size: heads of a
    cluster; smaller ones are noise. latent: numbers that a map is compressed to. epochs: most of the autoencoder's
    training. seed: how that begins."""

    block: int = 128
    threshold: float = 10.0
    min_size: int = 5
    latent: int = 64
    epochs: int = 1000
    seed: int = 0


@frozen(eq=False)
class Clustered:
    """The table, with what it was made from. heads: (layer, head) in order. labels: of each, below 0 for noise.

    similar: ``[heads, heads]``, averaged over the samples. restored_error: what the autoencoder loses.
    """

    table: ClusterTable
    heads: list[tuple[int, int]]
    labels: list[int] = field(repr=False)
    similar: Tensor = field(repr=False)
    restored_error: float = 0.0


def clustered(
    model: Any,
    identity: ModelIdentity,
    samples: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress = lambda what, done, of: None,
) -> Clustered:
    """Let the model read samples of one length densely, and cluster the block maps of its heads.

    samples: token ids. Raises UnsupportedCallError, AttachError or ParameterError as `capture.block_maps` does.
    """
    by_layer = capture.block_maps(model, samples, settings.block, lambda done, of: progress("layers", done, of))
    heads = [(layer, head) for layer, maps in by_layer.items() for head in range(maps.shape[1])]
    maps = torch.cat(list(by_layer.values()), 1)
    codes, error_left = autoencoder.compress(
        maps.flatten(0, 1),
        latent=settings.latent,
        epochs=settings.epochs,
        seed=settings.seed,
        device=model.device,
        progress=lambda done, of: progress("epochs", done, of),
    )
    chosen = group.labels(group.features(codes.unflatten(0, maps.shape[:2])), settings.threshold, settings.min_size)
    made = {"tokens": len(samples[0]), "samples": len(samples), **asdict(settings), "sparseprefill": __version__}
    table = group.table(heads, chosen, identity, made)
    similar = torch.stack([group.similarity(one) for one in maps]).mean(0)
    return Clustered(table, heads, chosen, similar, error_left)
