"""A model's heads, clustered: what `sparseprefill cluster` and `fit` make for share-prefill.

The model reads samples densely, which leaves the exact attention mass of every head by blocks of queries and keys.
These block maps are compressed, clustered, and compared by the patterns that they make.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from attrs import asdict, frozen
from torch import Tensor

from sparseprefill import __version__
from sparseprefill.call import AttentionCall, uncast
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result
from sparseprefill.profiles.table import MadeTable, ModelReader, Progress, Steps
from sparseprefill.statistics.select import top_mass

from .autoencoder import compress
from .table import ClusterTable, Settings, Spot


def clustered(
    reader: ModelReader[Pipeline],
    samples: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress = lambda what, done, of: None,
) -> MadeTable:
    """Let the model read samples of one length densely, and cluster the block maps of its heads.

    Heads of layers in which no method runs are noise. samples: token ids. Raises UnsupportedCallError, AttachError or
    ParameterError as `block_maps` does.
    """
    by_layer = block_maps(reader, samples, settings.block, lambda done, of: progress("layers", done, of))
    heads = [(layer, head) for layer, maps in by_layer.items() for head in range(maps.shape[1])]
    maps = torch.cat(list(by_layer.values()), 1)
    codes, error_left = compress(
        maps.flatten(0, 1),
        latent=settings.latent,
        epochs=settings.epochs,
        seed=settings.seed,
        device=reader.device,
        progress=lambda done, of: progress("epochs", done, of),
    )
    chosen = labels(features(codes.unflatten(0, maps.shape[:2])), settings.threshold, settings.min_size)
    made = {"tokens": len(samples[0]), "samples": len(samples), **asdict(settings), "sparseprefill": __version__}
    members: dict[int, list[Spot]] = {label: [] for label in range(-1, max(chosen) + 1)}
    for head, label in zip(heads, chosen, strict=True):
        members[label].append(head)
    without = [layer for layer in range(reader.identity.layers) if layer not in by_layer]
    members[-1] = sorted((*members[-1], *((layer, head) for layer in without for head in range(reader.identity.heads))))
    noise, *clusters = (tuple(one) for one in members.values())
    table = ClusterTable(clusters=tuple(clusters), noise=noise, model=reader.identity, made=made)
    # Mean similarity of two heads of one cluster, and of any other two; None where there are none.
    similar = torch.stack([similarity(one) for one in maps]).mean(0)
    label_of = torch.tensor(chosen, dtype=torch.int64, device=similar.device)
    other = ~torch.eye(len(chosen), dtype=torch.bool, device=similar.device)
    same = (label_of[:, None] == label_of) & (label_of >= 0) & other
    within, across = _mean(similar[same]), _mean(similar[~same & other])
    told = {"within clusters": within, "across": across}
    similarities = [f"{value:.2f} {where}" for where, value in told.items() if value is not None]
    rows = [(str(i), str(len(one)), _words(one)) for i, one in enumerate(table.clusters)]
    rows += [("noise", str(len(table.noise)), _words(table.noise))] if table.noise else []
    return MadeTable(
        table=table,
        measured=f"{len(heads)} heads",
        heads=("cluster", "heads", "layer.head"),
        rows=rows,
        words=("layer.head",),
        drop=("heads",),
        remarks=(
            *([f"similarity of the patterns: {', '.join(similarities)}"] if similarities else []),
            *([f"layers {without} run without a method, as those with a sliding window do: noise"] if without else []),
        ),
        facts={
            **made,
            **{"clusters": table.clusters, "noise": table.noise, "without": without, "restored_error": error_left},
            **{"similarity_within": within, "similarity_across": across},
        },
        useless="" if table.clusters else "no two heads of this model look alike",
    )


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if values.numel() else None


def _words(heads: Iterable[Spot]) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in heads)


@frozen
class ProbedDense:
    """Selects every key, and asks for the mass of every tile of every head."""

    block: int

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The full mask, with a probe."""
        heads = torch.ones(call.q.shape[:2], dtype=torch.bool, device=call.q.device)
        return Plan(SparseMask.full(call, self.block), probe=heads)


def block_maps(
    reader: ModelReader[Pipeline], samples: Sequence[Sequence[int]], block: int, progress: Steps = lambda done, of: None
) -> dict[int, Tensor]:
    """By layer: float32 ``[S, H, R, R]`` on the CPU, mean over a block's queries of the mass in a block of keys.

    Layers in which no method runs, as with a sliding window, have none. samples: token ids of S prompts of one length.
    Raises UnsupportedCallError where no layer has such a map, and AttachError or ParameterError as `ModelReader.read`
    does.
    """
    maps: dict[int, list[Tensor]] = {}
    total = len(samples) * reader.identity.layers

    def observe(call: AttentionCall, result: Result) -> None:
        if result.probe is None:
            raise UnsupportedCallError([f"layer {call.layer}: the executor gave no probe"])
        maps.setdefault(call.layer, []).append(result.probe[0].to("cpu", torch.float32))
        progress(sum(map(len, maps.values())), total)

    probed = Pipeline(ProbedDense(block), name="block-maps")
    for _ in reader.read(samples, probed, observe, verify=True):
        pass
    if not maps:
        raise UnsupportedCallError(["no layer has a block map: those with a sliding window run without a method"])
    return {layer: torch.stack(found) for layer, found in sorted(maps.items())}


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


@uncast
def similarity(maps: Tensor, gamma: float = 0.9) -> Tensor:
    """``[n, n]`` Jaccard similarity of the patterns of block maps ``[n, R, R]`` (section 4, Figure 2b).

    A pattern is the fewest blocks of each row that carry `gamma` of its mass.
    """
    shared = torch.zeros(len(maps), len(maps), dtype=torch.float32, device=maps.device)
    for row in range(maps.shape[1]):
        pattern = top_mass(maps[:, row, : row + 1], gamma).float()
        shared += pattern @ pattern.T
    size = shared.diagonal()
    union = size[:, None] + size - shared
    return shared / union.clamp(min=1)
