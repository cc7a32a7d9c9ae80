"""A layer's forward over the parts of a batch: sparse requests through the session, the rest through the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import StageError
from sparseprefill.pages import Pages

from ..session.session import Fallback
from .failures import ends_engine, reason
from .layer import Layer
from .runtime import Runtime
from .served import Served
from .split import Part

log = logging.getLogger(__name__)
Read = Callable[[Part], tuple[Tensor, Tensor] | Pages]
"""Keys and values of a part's request: ``[1, Hkv, N, D]`` in the query's dtype, or where they stand."""


def run(impl: Any, module: Any, query: Tensor, cache: Tensor, metadata: Any, output: Tensor, read: Read) -> bool:
    """Fill `output` with the attention of `query`, both ``[tokens, Hq, D]``; False if the host shall do all of it.

    impl: the layer's AttentionImpl, with a `runtime`, a `facts` to fill, its `stock` forward, and whether that is
    `slow`: then calls too small for the method run dense by the library's kernels. module: the layer.
    No reason to stay dense is an error, nor is what a stage, a gate or a plugin raises; only a lost device is.
    """
    parts = getattr(metadata, "parts", None)
    if impl.runtime is None or parts is None:
        return False
    if impl.facts is None:
        impl.facts = Layer.of(module.layer_name, impl)
    if impl.facts.reason is not None:
        for part in parts:
            _decline(impl.runtime, impl.facts, part, impl.facts.reason)
        return False
    for part in parts:
        rows, out = query[part.begin : part.end], output[part.begin : part.end]
        found = None if part.row is None else _sparse(impl, part, rows, read)
        if found is None:
            impl.stock(module, rows, None, None, cache, part.metadata(), out)  # K and V are in the cache already
        else:
            out.copy_(found[0].transpose(0, 1))
    return True


def _sparse(impl: Any, part: Part, rows: Tensor, read: Read) -> Tensor | None:
    """``[1, Hq, tokens, D]``, or None where the host shall compute the part."""
    runtime: Runtime = impl.runtime
    served = part.served or runtime.main
    layer: Layer = impl.facts
    if part.prefill is None or part.reason is not None:
        _decline(runtime, layer, part, part.reason or "the request is unknown")
        return None
    try:
        found = read(part)
        k, v = (found, found) if isinstance(found, Pages) else found
        call = AttentionCall(
            rows.transpose(0, 1)[None],
            k,
            v,
            scale=layer.scale,
            layer=layer.index,
            softcap=layer.softcap,
            sinks=layer.sinks,
            first_head=runtime.model.first_head,
            prompt_lengths=None if part.row is None else part.row.prompt,
        )
        outcome = served.session.run(call, part.prefill)
        if isinstance(outcome, Fallback):
            _count(served, layer, part, outcome.reason)
            return served.session.whole(call) if outcome.chosen and impl.slow else None
        if outcome.out.shape != call.q.shape:
            raise StageError(f"the output is {tuple(outcome.out.shape)}, and should be {tuple(call.q.shape)}")
    except Exception as error:
        # Other requests share this process: a broken stage, gate or plugin must not end them.
        if ends_engine(error):
            raise
        log.debug("layer %d", layer.index, exc_info=error)
        _decline(runtime, layer, part, reason(error))
        return None
    if part.chunk is not None:
        part.chunk.sparse = True
    return outcome.out


def _decline(runtime: Runtime, layer: Layer, part: Part, reason: str) -> None:
    if part.row is not None:
        served, shape = part.served or runtime.main, (1, part.end - part.begin, part.row.end)
        _count(served, layer, part, served.session.decline(layer.index, reason, shape).reason)


def _count(served: Served, layer: Layer, part: Part, reason: str) -> None:
    """The layer ran the part dense."""
    served.tally.fallback(layer.index, reason)
    if part.chunk is not None:
        part.chunk.reasons[reason] += 1
