"""A few layers of 8B shape with random weights: prefill and decoding on one GPU, through the ring, and through Star."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from sparseprefill.adapters.star.answer import counting_cache
from sparseprefill.adapters.star.api import Star

from lab.bench.clock import Run
from lab.bench.shape import ModelShape

from .layer import circle, sdpa

SHAPE = ModelShape(layers=4)
STEPS = 16  # tokens that a row of decoding counts
FITS = 524288  # tokens of a prefill on one GPU with 139 GiB: of twice as many an MLP's three products alone are 84
MOST = 1 << 21
"""Tokens that the model reads."""


@cache
def build(device: torch.device) -> Any:
    """The model, made on the device."""
    return SHAPE.build(MOST, device)


def star(device: torch.device, tokens: int, block: int, inner: str | None, timeout: float) -> Run:
    """Through `Star.encode`, on every rank."""
    model = Star(build(device), block_size=block, inner=inner, timeout=timeout)
    ids = _ids(tokens)
    return lambda: model.encode([ids])


def dense(device: torch.device, tokens: int) -> Run:
    """On each GPU by itself, cuDNN inside."""
    return _prefill(device, tokens, 1, nullcontext)


def ring(mesh: Any, device: torch.device, tokens: int) -> Run:
    """Each rank's part of the prompt through the decoder; K and V are repeated for the ring."""
    repeat = SHAPE.heads // SHAPE.kv_heads
    return _prefill(device, tokens // mesh.size(), repeat, partial(circle, mesh, device))


def decode_dense(device: torch.device, tokens: int) -> Run:
    """Tokens behind a cache of random keys on each GPU by itself, by the model as it is."""
    from transformers import DynamicCache

    model, cache = build(device), DynamicCache()
    for layer in range(SHAPE.layers):
        keys = torch.randn(2, 1, SHAPE.kv_heads, tokens, SHAPE.head_dim, dtype=SHAPE.torch_dtype, device=device)
        cache.update(keys[0], keys[1], layer)
    return partial(_decode, model, cache, tokens)


def decode_star(device: torch.device, tokens: int, timeout: float) -> Run:
    """Tokens behind a context that all ranks hold."""
    model = Star(build(device), timeout=timeout)
    context = model.encode([_ids(tokens)])

    def run() -> None:
        with model.switch.to(context.phase):
            _decode(model.model, counting_cache(list(model.layers), tokens), tokens, context.phase.step)

    return run


@torch.no_grad()
def _decode(model: Any, cache: Any, tokens: int, begin: Callable[[], None] = lambda: None) -> None:
    """So many tokens. begin: called before each."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    for step in range(STEPS):
        begin()
        places = torch.full_like(ids, tokens + step)
        ids = model(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True).logits.argmax(-1)


def _ids(tokens: int) -> list[int]:
    found: list[int] = torch.arange(tokens).remainder(SHAPE.vocabulary).tolist()
    return found


def _prefill(device: torch.device, tokens: int, repeat: int, around: Callable[[], Any]) -> Run:
    """The decoder over so many tokens; each layer's attention by `sdpa`, without a mask beside the causal one."""
    from transformers import AttentionInterface

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any = None, **kwargs: Any) -> tuple[Any, None]:
        k, v = (x if repeat == 1 else x.repeat_interleave(repeat, 1) for x in (k, v))
        return sdpa(q, k, v).transpose(1, 2).contiguous(), None

    name = f"sparseprefill_bench_{repeat}"
    AttentionInterface.register(name, attend)
    model = build(device)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    places = torch.arange(tokens, device=device)[None]  # positions change no time

    @torch.no_grad()
    def run() -> None:
        before = model.config._attn_implementation
        model.set_attn_implementation(name)
        try:
            with around():
                model.model(input_ids=ids, position_ids=places, use_cache=False)
        finally:
            model.set_attn_implementation(before)

    return run
