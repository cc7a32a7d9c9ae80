"""One attention layer of the host: what it asks of a call, and why it may have to stay dense."""

from __future__ import annotations

import re
from typing import Any

import torch
from attrs import frozen

from sparseprefill.call import AttentionCall
from sparseprefill.errors import InvalidCallError
from sparseprefill.route import Route

WINDOW = "the layer has a sliding window"
LATENT = "multi-head latent attention (MLA) has its own backends"


@frozen(eq=False)
class Layer:
    """index: among the model's. scale, softcap, sinks: see AttentionCall. reason: why it stays dense, or None."""

    index: int
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    reason: str | None

    @classmethod
    def of(cls, name: str, impl: Any) -> Layer:
        """name: such as ``model.layers.3.self_attn.attn``. impl: the host's AttentionImpl."""
        softcap = float(getattr(impl, "logits_soft_cap", 0) or 0)
        return cls(index_of(name), float(impl.scale), softcap or None, impl.sinks, _reason(name, impl))


def index_of(name: str) -> int:
    """The layer's index, taken from its name; -1 where the name has none."""
    found = re.search(r"\blayers?\.(\d+)", name) or re.search(r"\bh\.(\d+)", name) or re.search(r"\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _reason(name: str, impl: Any) -> str | None:
    kind = str(getattr(impl.attn_type, "value", impl.attn_type))
    window = impl.sliding_window
    cache = str(impl.kv_cache_dtype)
    if kind != "decoder":
        return f"the layer is of type {kind}, not a causal decoder's"
    if max(window if isinstance(window, tuple) else (window,)) > 0 or window == (0, 0):
        return WINDOW
    if getattr(impl, "alibi_slopes", None) is not None:
        return "the layer has ALiBi slopes"
    if getattr(impl, "chunk_lookback", -1) != -1:
        return "the layer attends in chunks"
    if "per_token_head" in cache or cache.startswith(("int", "nvfp4", "turboquant")):
        return f"the KV cache is {cache}: only bf16, fp16, fp32 and fp8 with one scale per tensor are read"
    if index_of(name) < 0:
        return f"the layer's name {name!r} has no index"
    return None


def unsupported(
    route: Route, layer: Layer, impl: Any, dtype: torch.dtype, device: torch.device, *, keys: int, first_head: int
) -> str | None:
    """Why the method objects to this layer's longest call, of `keys` keys, or None: asked with a call of no data."""
    zero = torch.zeros(1, dtype=dtype, device=device)
    q = zero.expand(1, impl.num_heads, min(keys, 16), impl.head_size)
    k = zero.expand(1, impl.num_kv_heads, keys, impl.head_size)
    try:
        call = AttentionCall(
            q,
            k,
            k,
            scale=layer.scale,
            layer=layer.index,
            softcap=layer.softcap,
            sinks=layer.sinks,
            first_head=first_head,
        )
    except InvalidCallError as error:
        return str(error)
    return "; ".join(route.unsupported(call)) or None
