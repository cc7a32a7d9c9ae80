"""What a model's layers do with a prompt, densely: attention by tile and key, and how much each changes its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.plan import Result
from sparseprefill.registry import default_registry
from sparseprefill.statistics.sampled import Logits

from ..huggingface import attach
from ..huggingface.inspection import find_decoder
from ..progress import Steps


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


@torch.inference_mode()
def readings(
    model: Any, samples: Sequence[Sequence[int]], tile: int, progress: Steps = lambda done, of: None
) -> Iterator[Reading]:
    """Of each sample of token ids; the layers that methods serve, which have no sliding window.

    Raises UnsupportedCallError where the model's attention modules cannot be found, AttachError or ParameterError as
    `attach` does.
    """
    total = len(samples) * int(model.config.get_text_config().num_hidden_layers)
    done = 0
    for ids in samples:
        sums: dict[int, LayerSums] = {}

        def observe(call: AttentionCall, result: Result, sums: dict[int, LayerSums] = sums) -> None:
            nonlocal done
            sums[call.layer] = LayerSums.of(call, tile)
            done += 1
            progress(done, total)

        given = torch.tensor([list(ids)], device=model.device)
        dense = default_registry().build("dense")
        with (
            _weighed(model) as weight,
            attach(model, dense, strict=True, observe=observe, verify=False, gate=None, tail=0, recall_every=0),
        ):
            model(given, use_cache=False, logits_to_keep=1)
        lost = sorted(set(sums) - set(weight))
        if lost or not sums:
            raise UnsupportedCallError([f"layers {lost}: no attention module with this layer_idx was found"])
        yield Reading(sums, weight)


@contextmanager
def _weighed(model: Any) -> Iterator[dict[int, float]]:
    """By layer how much its attention turns its input; filled while the model reads."""
    found: dict[int, float] = {}
    hooks = []
    decoder = find_decoder(model)
    for name, module in decoder.named_modules():
        layer = getattr(module, "layer_idx", None)
        if "Attention" not in type(module).__name__ or not isinstance(layer, int):
            continue
        owner = decoder.get_submodule(name.rpartition(".")[0])
        given: list[Tensor] = []

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor] = given) -> None:
            given[:] = [args[0] if args else kwargs["hidden_states"]]

        def after(_: Any, args: tuple[Any, ...], output: Any, layer: int = layer, given: list[Tensor] = given) -> None:
            added = output[0] if isinstance(output, tuple) else output
            x = given[0].float()
            turned = torch.nn.functional.cosine_similarity(x, x + added.float(), dim=-1)
            found[layer] = float(1 - turned.mean())

        hooks += [owner.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
