"""A layer's forward over the parts of a batch: sparse requests through the session, the rest through the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import StageError, frameless
from sparseprefill.pages import Pages
from sparseprefill.plan import Result

from ..session.kinds import Code, Why
from ..session.session import Fallback, Prefill
from .failures import code_of, ends_engine, reason
from .layer import Layer
from .parts import Part
from .runtime import Runtime
from .tally import Chunk, Served

log = logging.getLogger(__name__)
Read = Callable[[Part], tuple[Tensor, Tensor] | Pages]
"""Keys and values of a part's request: ``[1, Hkv, N, D]`` in the query's dtype, or where they stand."""
Stock = Callable[[Part, Tensor, Tensor], None]
"""Fills ``[tokens, Hq, D]`` of a part by the host's attention, from its queries; K and V are in the cache already."""


def run(
    runtime: Runtime,
    layer: Layer,
    parts: Sequence[Part],
    query: Tensor,
    output: Tensor,
    read: Read,
    stock: Stock,
    *,
    slow: bool,
) -> bool:
    """Fill `output` with the attention of `query`, both ``[tokens, Hq, D]``; False if the host shall do all of it.

    slow: whether the host's attention is, so that calls too small for the method run dense by the library's kernels.
    Requests that run sparse share a launch where their calls allow it; each is counted and may fail by itself. What a
    gate found of a step's sizes in one layer holds for the next, and where it left all of a batch to the host, the host
    computes that at once.
    No reason to stay dense is an error, nor is what a stage, a gate or a plugin raises; only a lost device is.
    """
    if layer.reason is not None:
        for part in parts:
            decline(runtime, layer, part, layer.reason)
        return False
    asked = [part for part in parts if part.row is not None]
    if asked and all(part.small is not None for part in asked):
        for part in asked:
            _again(runtime, layer, part)
        return False
    waiting: list[tuple[Part, AttentionCall]] = []

    def settle() -> None:
        for part, found in _outcomes(runtime, layer, waiting, slow):
            fill(part, found)
        waiting.clear()

    def fill(part: Part, found: Tensor | None) -> None:
        out = output[part.begin : part.end]
        if found is None:
            stock(part, query[part.begin : part.end], out)
        else:
            out.copy_(found[0].transpose(0, 1))

    for part in parts:
        known = part.row is None or _again(runtime, layer, part)
        found = None if known else _call(runtime, layer, part, query[part.begin : part.end], read)
        if found is None:
            fill(part, None)
            continue
        call, copied = found
        waiting.append((part, call))
        if copied:  # keys and values are not kept for long
            settle()
    settle()
    return True


def _call(runtime: Runtime, layer: Layer, part: Part, rows: Tensor, read: Read) -> tuple[AttentionCall, bool] | None:
    """The session's call for a part, and True if its keys are copies; None where the host shall compute it."""
    if part.prefill is None or part.reason is not None:
        decline(runtime, layer, part, part.reason or "the request is unknown", Code.REQUEST)
        return None
    try:
        found = read(part)
        copied = not isinstance(found, Pages)
        k, v = (found, found) if isinstance(found, Pages) else found
        call = AttentionCall(
            rows.transpose(0, 1)[None],
            k,
            v,
            first_head=runtime.model.first_head,
            prompt_lengths=None if part.row is None else part.row.prompt,
            **layer.facts,
        )
        return call, copied
    except Exception as error:
        _fail(runtime, layer, part, error)
        return None


def _outcomes(
    runtime: Runtime, layer: Layer, waiting: Sequence[tuple[Part, AttentionCall]], slow: bool
) -> Iterator[tuple[Part, Tensor | None]]:
    """``[1, Hq, tokens, D]`` of each part, or None for the host to compute it; what one method serves runs together."""
    by_method: dict[Served, list[tuple[Part, AttentionCall, Prefill]]] = {}
    for part, call in waiting:
        if part.prefill is not None:
            by_method.setdefault(part.served or runtime.main, []).append((part, call, part.prefill))
    for served, some in by_method.items():
        asked = [(call, prefill, _rows_read(runtime, layer, part)) for part, call, prefill in some]
        outcomes = served.session.run_many(asked)
        for (part, *_), outcome in zip(some, outcomes, strict=True):
            if isinstance(outcome, Exception):  # before the host computes any: what failed may hold memory
                _fail(runtime, layer, part, outcome)
        for (part, call, _), outcome in zip(some, outcomes, strict=True):
            try:
                found = None if isinstance(outcome, Exception) else _output(served, layer, part, call, outcome, slow)
            except Exception as error:
                _fail(runtime, layer, part, error)
                found = None
            yield part, found


def _rows_read(runtime: Runtime, layer: Layer, part: Part) -> int | None:
    """Number of a part's last rows that anybody reads in this layer; None for all."""
    return 1 if layer.index == runtime.unread and part.row is not None and part.row.ends_alone else None


def _output(
    served: Served, layer: Layer, part: Part, call: AttentionCall, outcome: Result | Fallback, slow: bool
) -> Tensor | None:
    if isinstance(outcome, Fallback):
        _count(served, layer, part, outcome.why)
        if outcome.chosen and slow:
            return _whole(served, layer, call)
        part.small = outcome if outcome.small else None
        return None
    wanted = (*call.q.shape[:3], call.value_dim)
    if outcome.out.shape != wanted:
        raise StageError(f"the output is {tuple(outcome.out.shape)}, and should be {wanted}")
    if part.chunk is not None:
        part.chunk.sparse += 1
        _end(part.chunk)
    return outcome.out


def _whole(served: Served, layer: Layer, call: AttentionCall) -> Tensor | None:
    """Dense attention by the library's kernels; where it fails the host computes the call, which is counted already."""
    try:
        return served.session.whole(call)
    except Exception as error:
        _survive(layer, error)
        served.session.note(f"dense attention is left to the host: {reason(error)}")
        return None


def _again(runtime: Runtime, layer: Layer, part: Part) -> bool:
    """Record a part that a layer before left to the host for its sizes; False for any other."""
    if part.row is None or part.small is None:
        return False
    served, shape = part.served or runtime.main, (1, part.end - part.begin, part.row.end)
    _count(served, layer, part, served.session.again(layer.index, part.small, shape).why)
    return True


def _fail(runtime: Runtime, layer: Layer, part: Part, error: Exception) -> None:
    """The host computes the part, and the error is the reason."""
    _survive(layer, error)
    decline(runtime, layer, part, reason(error), code_of(error))


def _survive(layer: Layer, error: Exception) -> None:
    """Other requests share this process: a broken stage, gate or plugin must not end them, nor hold what it used."""
    if ends_engine(error):
        raise error
    log.debug("layer %d", layer.index, exc_info=error)
    frameless(error)


def decline(runtime: Runtime, layer: Layer, part: Part, reason: str, code: Code = Code.LAYER) -> None:
    """Leave a part to the host in this layer, and record why. code: the reason's, by default a layer's own."""
    if part.row is not None:
        served, shape = part.served or runtime.main, (1, part.end - part.begin, part.row.end)
        _count(served, layer, part, served.session.decline(layer.index, reason, shape, code).why)


def _count(served: Served, layer: Layer, part: Part, why: Why) -> None:
    """The layer ran the part dense."""
    served.tally.fallback(layer.index, why)
    if part.chunk is not None:
        part.chunk.reasons[why] += 1
        _end(part.chunk)


def _end(chunk: Chunk) -> None:
    """Count a chunk whose last layer is through."""
    if chunk.sparse + chunk.reasons.total() == chunk.layers:
        chunk.settle()
        if chunk.step is not None:
            chunk.step.through()
