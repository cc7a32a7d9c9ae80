"""One attention layer in vLLM's words."""

from __future__ import annotations

import re
from typing import Any

from ..serving.layer import CHUNKED, WINDOW, Heads, Layer

INDEXED = "the model chooses its keys itself (sparse MLA)"


def layer_of(name: str, impl: Any) -> Layer:
    """name: such as ``model.layers.3.self_attn.attn``. impl: the host's AttentionImpl."""
    softcap = float(getattr(impl, "logits_soft_cap", 0) or 0)
    return Layer(index_of(name), float(impl.scale), softcap or None, impl.sinks, _reason(name, impl))


def heads_of(impl: Any, first: int) -> Heads:
    """first: index of the first of the model's heads that is in this process."""
    return Heads(int(impl.num_heads), int(impl.num_kv_heads), int(impl.head_size), first)


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
        return CHUNKED
    if "per_token_head" in cache or cache.startswith(("int", "nvfp4", "turboquant")):
        return f"the KV cache is {cache}: only bf16, fp16, fp32 and fp8 with one scale per tensor are read"
    if index_of(name) < 0:
        return f"the layer's name {name!r} has no index"
    return None
