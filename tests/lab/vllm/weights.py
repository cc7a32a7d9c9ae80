"""A model of random weights for the engine: a configuration on disk, and what its parameters are filled with.

vLLM's own dummy weights are next to zero, and so are the logits that come of them: each of its tokens is a tie. These
leave the logits as far apart as a trained model's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lab.bench.shape import ModelShape

QUERIES, LOGITS = 2.0, 4.0
"""Gains of the projections to q, k and v, so that each query prefers some keys, and of the last layer."""


def save(shape: ModelShape, tokens: int, folder: Path) -> Path:
    """The configuration of such a Llama that reads so many tokens; returns the folder. Needs transformers."""
    shape.config(tokens, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Random parameters, the same for a seed and a device: norms that change nothing, matrices that keep the scale."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        if weight.dim() < 2:
            weight.fill_(1.0 if "norm" in name else 0.0)
            continue
        source = torch.Generator(weight.device).manual_seed(1000 * seed + number)
        weight.normal_(0.0, _gain(name) * (1.0 if "embed" in name else weight.shape[1] ** -0.5), generator=source)


def _gain(name: str) -> float:
    return QUERIES if "qkv" in name else LOGITS if "lm_head" in name else 1.0
