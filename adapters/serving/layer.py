"""One attention layer of a server: what it asks of a call, and why it may have to stay dense."""

from __future__ import annotations

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


@frozen
class Heads:
    """Of a layer, in this process: how many queries and keys have, the size of one, and the index of the first."""

    query: int
    kv: int
    size: int
    first: int = 0


def unsupported(
    route: Route, layer: Layer, heads: Heads, dtype: torch.dtype, device: torch.device, *, keys: int
) -> str | None:
    """Why the method objects to this layer's longest call, of `keys` keys, or None: asked with a call of no data."""
    zero = torch.zeros(1, dtype=dtype, device=device)
    q = zero.expand(1, heads.query, min(keys, 16), heads.size)
    k = zero.expand(1, heads.kv, keys, heads.size)
    try:
        call = AttentionCall(
            q,
            k,
            k,
            scale=layer.scale,
            layer=layer.index,
            softcap=layer.softcap,
            sinks=layer.sinks,
            first_head=heads.first,
        )
    except InvalidCallError as error:
        return str(error)
    return "; ".join(route.unsupported(call)) or None
