"""One attention layer of a server: what it asks of a call, and why it may have to stay dense."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from attrs import frozen

from sparseprefill.call import AttentionCall
from sparseprefill.errors import AttachError, InvalidCallError
from sparseprefill.route import Route

from .failures import reason as failed

WINDOW = "the layer has a sliding window"
CHUNKED = "the layer attends in chunks"
LATENT = "multi-head latent attention (MLA) has its own backends"


@frozen(eq=False)
class Layer:
    """index: among the model's. scale, softcap, sinks: see AttentionCall. reason: why it stays dense, or None."""

    index: int
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    reason: str | None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Arguments of an AttentionCall that are the layer's own."""
        return {"scale": self.scale, "layer": self.index, "softcap": self.softcap, "sinks": self.sinks}


@frozen
class Heads:
    """A layer's heads in this process: how many queries and keys have, the size of one, and the index of the first.

    values: the size of a value, where it is another; 0 where it is not.
    """

    query: int
    kv: int
    size: int
    first: int = 0
    values: int = 0


def dense_reason(
    route: Route,
    layer: Layer,
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    *,
    keys: int,
    min_query: int,
    step: int,
    bound: str,
) -> str | None:
    """Reason for which a layer will stay dense, or None. AttachError where a stage cannot be asked.

    keys: of the longest request. step: tokens of the longest chunk of a prompt; bound: the server's option for it.
    """
    if layer.reason is not None:
        return layer.reason
    if left := route.stays_dense(layer.index):
        return left
    if min_query > step:
        return f"min_query is {min_query}, but no chunk has more than {step} tokens ({bound})"
    try:
        return unsupported(route, layer, heads, dtype, device, keys=keys)
    except Exception as error:
        said = failed(error)
        raise AttachError(f"layer {layer.index}: {route.name} cannot say what it supports: {said}") from error


def unsupported(
    route: Route, layer: Layer, heads: Heads, dtype: torch.dtype, device: torch.device, *, keys: int
) -> str | None:
    """The method's objection to this layer's longest call, of `keys` keys, or None: asked with a call of no data."""
    try:
        call = example(layer, heads, dtype, device, keys=keys)
    except InvalidCallError as error:
        return str(error)
    return "; ".join(route.unsupported(call)) or None


def example(layer: Layer, heads: Heads, dtype: torch.dtype, device: torch.device, *, keys: int) -> AttentionCall:
    """A call of this layer with so many keys and no data; InvalidCallError where it can have none."""
    zero = torch.zeros(1, dtype=dtype, device=device)
    q = zero.expand(1, heads.query, min(keys, 16), heads.size)
    k = zero.expand(1, heads.kv, keys, heads.size)
    v = zero.expand(1, heads.kv, keys, heads.values or heads.size)
    return AttentionCall(q, k, v, first_head=heads.first, **layer.facts)
