"""Block maps: the exact attention mass of every head of a model, by blocks of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result

if TYPE_CHECKING:
    from sparseprefill.profiles.progress import Steps
    from sparseprefill.profiles.table import ModelReader


@frozen
class ProbedDense:
    """Selects every key, and asks for the mass of every tile of every head."""

    block: int

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The full mask, with a probe."""
        heads = torch.ones(call.q.shape[:2], dtype=torch.bool, device=call.q.device)
        return Plan(SparseMask.full(call, self.block), probe=heads)


def block_maps(
    reader: ModelReader, samples: Sequence[Sequence[int]], block: int, progress: Steps = lambda done, of: None
) -> dict[int, Tensor]:
    """By layer: float32 ``[S, H, R, R]`` on the CPU, mean over a block's queries of the mass in a block of keys.

    samples: token ids of S prompts of one length. Raises UnsupportedCallError where a layer has no such map, as one
    with a sliding window, and AttachError or ParameterError as `ModelReader.read` does.
    """
    maps: dict[int, list[Tensor]] = {}
    total = len(samples) * reader.identity.layers

    def observe(call: AttentionCall, result: Result) -> None:
        if result.probe is None:
            raise UnsupportedCallError([f"layer {call.layer}: the executor gave no probe"])
        maps.setdefault(call.layer, []).append(result.probe[0].to("cpu", torch.float32))
        progress(sum(map(len, maps.values())), total)

    probed = Pipeline(ProbedDense(block), name="block-maps")
    seen = {layer for layers in reader.read(samples, probed, observe, verify=True) for layer in layers}
    lost = sorted(seen - set(maps))
    if lost or not maps:
        raise UnsupportedCallError([f"layers {lost}: no block map; layers with a sliding window run without a method"])
    return {layer: torch.stack(found) for layer, found in sorted(maps.items())}
