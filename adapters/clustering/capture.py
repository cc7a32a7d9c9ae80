"""Block maps: the exact attention mass of every head of a model, by blocks of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result

from ..huggingface import attach
from ..progress import Steps


@frozen
class ProbedDense:
    """Selects every key, and asks for the mass of every tile of every head."""

    block: int

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The full mask, with a probe."""
        heads = torch.ones(call.q.shape[:2], dtype=torch.bool, device=call.q.device)
        return Plan(SparseMask.full(call, self.block), probe=heads)


@torch.inference_mode()
def block_maps(
    model: Any, samples: Sequence[Sequence[int]], block: int, progress: Steps = lambda done, of: None
) -> dict[int, Tensor]:
    """By layer: float32 ``[S, H, R, R]`` on the CPU, mean over a block's queries of the mass in a block of keys.

    samples: token ids of S prompts of one length. Raises UnsupportedCallError where a layer has no such map, as one
    with a sliding window, and AttachError or ParameterError as `attach` does.
    """
    maps: dict[int, list[Tensor]] = {}
    total = len(samples) * int(model.config.get_text_config().num_hidden_layers)

    def observe(call: AttentionCall, result: Result) -> None:
        if result.probe is None:
            raise UnsupportedCallError([f"layer {call.layer}: the executor gave no probe"])
        maps.setdefault(call.layer, []).append(result.probe[0].to("cpu", torch.float32))
        progress(sum(map(len, maps.values())), total)

    with attach(
        model,
        Pipeline(ProbedDense(block), name="block-maps"),
        strict=True,
        observe=observe,
        gate=None,
        tail=0,
        recall_every=0,
    ) as handle:
        for ids in samples:
            model(torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
        seen = [layer.layer for layer in handle.report().layers]
    lost = sorted(set(seen) - set(maps))
    if lost or not maps:
        raise UnsupportedCallError([f"layers {lost}: no block map; layers with a sliding window run without a method"])
    return {layer: torch.stack(found) for layer, found in sorted(maps.items())}
