"""From compressed maps to clusters, and how alike heads are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.statistics.select import top_mass

from ..table import ClusterTable, Spot


def features(codes: Tensor) -> Tensor:
    """``[heads, latent]`` from codes ``[samples, heads, latent]``: the mean, every dimension with variance 1.

    Dimensions that are the same for all heads are left out.
    """
    mean = codes.mean(0)
    spread = mean.std(0, correction=0)
    alive = spread > 1e-6 * spread.max().clamp(min=torch.finfo(mean.dtype).tiny)
    return (mean - mean.mean(0))[:, alive] / spread[alive]


def labels(found: Tensor, threshold: float, min_size: int) -> list[int]:
    """The cluster of each head, largest first; -1 for those whose cluster has fewer than `min_size` heads.

    Hierarchical clustering of features ``[heads, n]`` with Ward's linkage, cut at the distance `threshold` (A.4).
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    if found.shape[0] < 2 or found.shape[1] == 0:
        raw = [1] * found.shape[0]
    else:
        raw = fcluster(linkage(found.double().numpy(), "ward"), threshold, "distance").tolist()
    sizes = {label: raw.count(label) for label in raw}
    order = sorted(sizes, key=lambda label: (-sizes[label], raw.index(label)))
    kept = [label for label in order if sizes[label] >= min_size]
    return [kept.index(label) if label in kept else -1 for label in raw]


def table(heads: list[Spot], chosen: list[int], model: ModelIdentity, made: Mapping[str, Any]) -> ClusterTable:
    """The heads, in the order of their labels, as a table."""
    members: dict[int, list[Spot]] = {}
    for head, label in zip(heads, chosen, strict=True):
        members.setdefault(label, []).append(head)
    noise = tuple(members.pop(-1, []))
    return ClusterTable(
        clusters=tuple(tuple(members[label]) for label in sorted(members)), noise=noise, model=model, made=made
    )


def similarity(maps: Tensor, gamma: float = 0.9) -> Tensor:
    """``[n, n]`` Jaccard similarity of the patterns of block maps ``[n, R, R]`` (section 4, Figure 2b).

    A pattern is the fewest blocks of each row that carry `gamma` of its mass.
    """
    shared = torch.zeros(len(maps), len(maps))
    for row in range(maps.shape[1]):
        pattern = top_mass(maps[:, row, : row + 1], gamma).float()
        shared += pattern @ pattern.T
    size = shared.diagonal()
    union = size[:, None] + size - shared
    return shared / union.clamp(min=1)
