"""Prefill of a few layers of 8B shape with random weights: through the ring, and through Star."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..api import Star
from ..layout import BLOCK
from ..ranks import Ranks
from .layer import Run

LAYERS, VOCABULARY = 4, 1024
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1 << 21,
}


@cache
def build(device: torch.device) -> Any:
    """The model, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    finally:
        torch.set_default_dtype(before)


def runs(ranks: Ranks, mesh: Any, device: torch.device, tokens: int) -> dict[str, Callable[[], Run]]:
    """Names and what makes them ready."""
    block = tokens // ranks.size
    found = {
        "layers, ring": lambda: _ring(mesh, device, tokens),
        f"layers, star, blocks of 1/{ranks.size}": lambda: _star(device, tokens, block, None),
        f"layers, star, blocks of 1/{ranks.size}, streaming inside": lambda: _star(device, tokens, block, "streaming"),
    }
    if block > BLOCK:
        found["layers, star, blocks of 32K"] = lambda: _star(device, tokens, BLOCK, None)
    return found


def _star(device: torch.device, tokens: int, block: int, inner: str | None) -> Run:
    star = Star(build(device), block_size=block, inner=inner)
    ids = torch.arange(tokens).remainder(VOCABULARY).tolist()
    return lambda: star.encode([ids])


def _ring(mesh: Any, device: torch.device, tokens: int) -> Run:
    """Each rank's part of the prompt through the decoder; the attention function repeats K and V for the ring."""
    from torch.distributed.tensor.experimental import context_parallel
    from transformers import AttentionInterface

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any = None, **kwargs: Any) -> tuple[Any, None]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sparseprefill_bench_ring", attend)
    model = build(device)
    share = tokens // mesh.size()
    ids = torch.zeros(1, share, dtype=torch.int64, device=device)
    places = torch.arange(share, device=device)[None]  # positions change no time
    dummy = torch.zeros(2 * mesh.size(), device=device)

    @torch.no_grad()
    def run() -> None:
        before = model.config._attn_implementation
        model.set_attn_implementation("sparseprefill_bench_ring")
        try:
            with context_parallel(mesh, buffers=[dummy], buffer_seq_dims=[0], no_restore_buffers={dummy}):
                model.model(input_ids=ids, position_ids=places, use_cache=False)
        finally:
            model.set_attn_implementation(before)
            dummy.resize_(2 * mesh.size())

    return run
