"""A model's anchor layers and maps of heads: what `sparseprefill anchors` and `fit` make for kascade.

The model reads samples densely, while the attention of each layer is summed by tile and key, and how much each changes
its input. Then layers are compared by how well the keys of one serve another, and those are picked that serve all best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import asdict, frozen
from torch import Tensor

from sparseprefill import __version__
from sparseprefill.call import AttentionCall
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Result
from sparseprefill.profiles.table import MadeTable, ModelReader, Progress, Steps
from sparseprefill.registry import default_registry
from sparseprefill.statistics.sampled import Logits

from .table import AnchorTable, Settings

ONE_IN = 7
"""Layers to an anchor, about, where nobody says how many: 5 of 32, as the authors pick."""


def anchored(
    reader: ModelReader[Pipeline],
    samples: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress = lambda what, done, of: None,
) -> MadeTable:
    """Let the model read samples densely, and choose its anchor layers.

    samples: token ids, longer than a tile with its columns. Raises ParameterError for shorter ones, and as
    `readings` does.
    """
    settings.check(min(map(len, samples)))
    similar: dict[tuple[int, int], Tensor] = {}
    weight: dict[int, float] = {}
    for sums, weights in readings(reader, samples, settings.tile, lambda done, of: progress("layers", done, of)):
        own = {layer: TopKeys.of(one, settings.columns) for layer, one in sums.items()}
        for a in own:
            for b in (layer for layer in own if layer >= a):
                share = similarity(own[a], sums[b], own[b]).double().cpu() / len(samples)
                similar[a, b] = similar.get((a, b), torch.zeros_like(share)) + share
        for layer in own:
            weight[layer] = weight.get(layer, 0.0) + weights[layer] / len(samples)
    layers = tuple(sorted(weight))
    gain = ordered(layers, similar, weight)
    count = -(-len(layers) // ONE_IN) if settings.count is None else min(settings.count, len(layers))
    whole = max(float(gain.diagonal().sum()), torch.finfo(torch.float64).tiny)
    scores: dict[int, tuple[tuple[int, ...], float]] = {}
    for k in range(1, min(max(8, count), len(layers)) + 1):
        chosen, value = best(gain, k)
        scores[k] = (tuple(layers[i] for i in chosen), value / whole)
    anchors = scores[count][0]
    before = {layer: max(one for one in anchors if one <= layer) for layer in layers}
    maps = {layer: mapped(similar[anchor, layer]) for layer, anchor in before.items() if anchor != layer}
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


@frozen(eq=False)
class LayerSums:
    """Sums of one layer on one prompt, over a tile's rows and a KV head's query heads.

    before: ``[Hkv, T, N]``, attention to each key before a tile; 0 at and behind it. inside: ``[Hkv, T]``, to its own.
    """

    before: Tensor
    inside: Tensor

    @classmethod
    def of(cls, call: AttentionCall, tile: int) -> LayerSums:
        """Sums over a whole prompt without padding, in tiles from its first token on; one tile at a time."""
        n = call.q.shape[2]
        before, inside = [], []
        for first in range(0, n, tile):
            index = torch.arange(first, min(first + tile, n), device=call.q.device)[None]
            logits = Logits(call, index, torch.ones_like(index, dtype=torch.bool)).of(slice(0, int(index[0, -1]) + 1))
            by_key = torch.softmax(logits[0], -1).sum(1).unflatten(0, (-1, call.group)).sum(1)  # [Hkv, keys]
            before.append(torch.nn.functional.pad(by_key[:, :first], (0, n - first)))
            inside.append(by_key[:, first:].sum(-1))
        return cls(torch.stack(before, 1), torch.stack(inside, 1))


def readings(
    reader: ModelReader[Pipeline], samples: Sequence[Sequence[int]], tile: int, progress: Steps = lambda done, of: None
) -> Iterator[tuple[dict[int, LayerSums], dict[int, float]]]:
    """For each sample of token ids, by layer: its sums, and its weight, the mean over the sample's tokens of
    ``1 - cos(x, x + attention)``. Layers are those that methods serve, which have no sliding window.

    Raises UnsupportedCallError where the model's attention modules cannot be found, AttachError or ParameterError as
    `ModelReader.read` does.
    """
    total = len(samples) * reader.identity.layers
    done = 0
    sums: dict[int, LayerSums] = {}
    weight: dict[int, float] = {}

    def observe(call: AttentionCall, result: Result) -> None:
        nonlocal done
        sums[call.layer] = LayerSums.of(call, tile)
        done += 1
        progress(done, total)

    def added(layer: int, x: Tensor, y: Tensor) -> None:
        x = x.float()
        weight[layer] = float(1 - torch.nn.functional.cosine_similarity(x, x + y.float(), dim=-1).mean())

    for _ in reader.read(samples, default_registry().build("dense"), observe, added):
        lost = sorted(set(sums) - set(weight))
        if lost or not sums:
            raise UnsupportedCallError([f"layers {lost}: no attention module with this layer_idx was found"])
        yield dict(sums), dict(weight)
        sums.clear()
        weight.clear()


@frozen(eq=False)
class TopKeys:
    """The keys that a layer would keep: index ``[Hkv, T, k]``, and what they hold of its own sums, ``[Hkv, T]``."""

    index: Tensor
    held: Tensor

    @classmethod
    def of(cls, sums: LayerSums, columns: int) -> TopKeys:
        """The `columns` keys of the largest sums of each tile."""
        top = sums.before.topk(min(columns, sums.before.shape[-1]), dim=-1)
        return cls(top.indices, top.values.sum(-1))


def similarity(one: TopKeys, other: LayerSums, own: TopKeys) -> Tensor:
    """``[H', H]``: of what its own keys would hold for KV head h' of `other`, how much those of head h of `one` hold.

    S of the authors' code: what lies inside the tile counts on both sides, and the tile that fares worst counts.
    """
    heads, tiles, count = one.index.shape
    each = []
    for h in range(heads):
        index = one.index[h].expand(other.before.shape[0], tiles, count)
        held = torch.gather(other.before, 2, index).sum(-1)  # [H', T]
        each.append(((held + other.inside) / (own.held + other.inside)).amin(-1))
    return torch.stack(each, 1)


def best(gain: Tensor, count: int) -> tuple[tuple[int, ...], float]:
    """Indices of the `count` rows, the first among them, that serve all best, and how well; by dynamic programming.

    gain: ``[n, n]``, entry (a, b) what b has from a; of columns before a row nothing is read. A row serves itself and
    those up to the next: ``V[k][i] = max over l < i of V[k - 1][l] + sum of gain[l, l:i]``.
    """
    n = gain.shape[0]
    table = gain.double().triu()
    served = torch.cat([table.new_zeros(n, 1), table.cumsum(1)], 1)  # [l, i]: of l, what it gives up to i
    value = torch.full((count + 1, n + 1), -torch.inf, dtype=torch.float64, device=gain.device)
    value[0, 0] = 0.0
    came = torch.zeros_like(value, dtype=torch.int64)
    for k in range(1, count + 1):
        for i in range(k, n + 1):
            options = value[k - 1, :i] + served[:i, i]
            came[k, i] = options.argmax()
            value[k, i] = options.max()
    chosen: list[int] = []
    i = n
    for k in range(count, 0, -1):
        i = int(came[k, i])
        chosen.append(i)
    return tuple(reversed(chosen)), float(value[count, n])


def mapped(similar: Tensor) -> tuple[int, ...]:
    """For each head h' the head h of the other layer that serves it best; of equal ones its own number, else the first.

    similar: ``[H', H]``.
    """
    own = similar.diagonal()
    most = similar.max(1)
    return tuple(
        torch.where(own >= most.values, torch.arange(len(similar), device=similar.device), most.indices).tolist()
    )


def ordered(layers: Sequence[int], similar: dict[tuple[int, int], Tensor], weight: dict[int, float]) -> Tensor:
    """``[n, n]``: what layer b has from layer a: its weight times the mean over its heads of the best head's share."""
    gain = torch.zeros(len(layers), len(layers), dtype=torch.float64, device="cpu")
    for i, a in enumerate(layers):
        for j, b in enumerate(layers[i:], i):
            gain[i, j] = weight[b] * float(similar[a, b].amax(1).mean())
    return gain
