"""One attention layer in SGLang's words, a RadixAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseprefill.pages import STORED

from ..serving.layer import CHUNKED, WINDOW, Heads, Layer

KNOWN = ("sinks",)
"""Arguments of a layer's call that ours have too."""
POOL = "the KV pool holds {what}: only bf16, fp16, fp32 and fp8 by token are read"


def layer_of(layer: Any, pool: Any) -> Layer:
    """layer: SGLang's. pool: the KV pool, ``token_to_kv_pool`` of its model runner."""
    softcap = float(layer.logit_cap or 0)
    return Layer(int(layer.layer_id), float(layer.scaling), softcap or None, None, _reason(layer, pool))


def heads_of(layer: Any, first: int) -> Heads:
    """first: index of the first of the model's heads that is in this process."""
    return Heads(int(layer.tp_q_head_num), int(layer.tp_k_head_num), int(layer.qk_head_dim), first)


def objection(extra: Mapping[str, object]) -> str | None:
    """Reason for which a call with these further arguments runs dense, or None."""
    given = {name for name, value in extra.items() if value is not None and value is not False}
    said = sorted(given.difference(KNOWN))
    return f"the layer is called with {', '.join(said)}, which the methods do not know" if said else None


def _reason(layer: Any, pool: Any) -> str | None:
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    if layer.is_cross_attention:
        return "the layer attends to an encoder"
    if kind != "decoder":
        return f"the layer is of type {kind}, not a causal decoder's"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return WINDOW
    if layer.use_irope:
        return CHUNKED
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"the layer caps its logits by {layer.logit_capping_method}"
    if layer.pos_encoding_mode != "NONE":
        return f"the layer encodes positions by {layer.pos_encoding_mode}"
    if layer.xai_temperature_len > 0:
        return "the layer scales its queries by their position"
    if layer.v_head_dim != layer.qk_head_dim:
        return f"values have {layer.v_head_dim} numbers and keys {layer.qk_head_dim}"
    return _unread(layer, pool)


def _unread(layer: Any, pool: Any) -> str | None:
    inner = getattr(pool, "full_kv_pool", pool)
    if getattr(inner, "is_quantized_kv_cache", False) or getattr(inner, "use_hnd", False):
        return POOL.format(what="keys in another layout")
    k = pool.get_key_buffer(layer.layer_id)
    if k.dim() != 3 or k.dtype not in STORED:
        return POOL.format(what=f"{k.dtype} of {k.dim()} dimensions")
    return None
