"""A model of random weights for the engine: a configuration on disk, and what its parameters are filled with.

vLLM's own dummy weights are next to zero, and so are the logits that come of them: each of its tokens is a tie. These
leave the logits as far apart as a trained model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...bench.model import ModelShape

QUERIES, LOGITS = 2.0, 4.0
"""Gains of the projections to q, k and v, so that each query prefers some keys, and of the last layer."""


def save(shape: ModelShape, tokens: int, folder: Path) -> Path:
    """The configuration of such a Llama that reads so many tokens; returns the folder. Needs transformers."""
    from transformers import LlamaConfig

    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=tokens,
        bos_token_id=0,
        eos_token_id=1,
        architectures=["LlamaForCausalLM"],
        **rope,
    ).save_pretrained(folder)
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
