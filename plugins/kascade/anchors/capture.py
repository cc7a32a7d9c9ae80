"""What a model's layers do with a prompt, densely: attention by tile and key, and how much each changes its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.plan import Result
from sparseprefill.registry import default_registry
from sparseprefill.statistics.sampled import Logits

if TYPE_CHECKING:
    from sparseprefill.profiles.progress import Steps
    from sparseprefill.profiles.table import ModelReader


@frozen(eq=False)
class LayerSums:
    """Of one layer on one prompt. before: ``[Hkv, T, N]``, attention to each key before a tile, summed over the tile's
    rows and the KV head's query heads; 0 at and behind the tile. inside: ``[Hkv, T]``, what lies in the tile itself.
    """

    before: Tensor
    inside: Tensor

    @classmethod
    def of(cls, call: AttentionCall, tile: int) -> LayerSums:
        """Of a whole prompt without padding, in tiles from its first token on; one tile at a time."""
        n = call.q.shape[2]
        before, inside = [], []
        for first in range(0, n, tile):
            index = torch.arange(first, min(first + tile, n), device=call.q.device)[None]
            logits = Logits(call, index, torch.ones_like(index, dtype=torch.bool)).of(slice(0, int(index[0, -1]) + 1))
            by_key = torch.softmax(logits[0], -1).sum(1).unflatten(0, (-1, call.group)).sum(1)  # [Hkv, keys]
            before.append(torch.nn.functional.pad(by_key[:, :first], (0, n - first)))
            inside.append(by_key[:, first:].sum(-1))
        return cls(torch.stack(before, 1), torch.stack(inside, 1))


@frozen(eq=False)
class Reading:
    """One prompt. sums: by layer. weight: by layer, the mean over its tokens of ``1 - cos(x, x + attention)``."""

    sums: dict[int, LayerSums]
    weight: dict[int, float]


def readings(
    reader: ModelReader, samples: Sequence[Sequence[int]], tile: int, progress: Steps = lambda done, of: None
) -> Iterator[Reading]:
    """Of each sample of token ids; the layers that methods serve, which have no sliding window.

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
        yield Reading(dict(sums), dict(weight))
        sums.clear()
        weight.clear()
