"""A layer's forward over the parts of a batch: sparse requests through the session, the rest through the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import frameless
from sparseprefill.pages import Pages

from ..session.kinds import Code, Why
from ..session.ledger import Ran
from ..session.prospects import NOT_CHOSEN
from ..session.repeat import LEFT, Repeat
from ..session.session import Fallback, Outcome, Prefill
from .failures import code_of, ends_engine, reason
from .layer import Layer
from .parts import Batch, Known, Part, Repeated
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
    parts: Batch,
    query: Tensor,
    output: Tensor,
    slots: Sequence[Tensor],
    read: Read,
    stock: Stock,
    *,
    slow: bool,
) -> bool:
    """Fill `output` with the attention of `query`, both ``[tokens, Hq, D]``; False if the host shall do all of it.

    slots: the host's tensors that all of this is read from and written to, those two among them; the layers of a step
    differ in them alone. slow: whether the host's attention is, so that calls too small for the method run dense by the
    library's kernels. Requests that run sparse share a launch where their calls allow it; each is counted and may fail
    by itself. What a layer came to is repeated in those after it (`Known`).
    No reason to stay dense is an error, nor is what a stage, a gate or a plugin raises; only a lost device is.
    """
    chosen = runtime.session.layers
    if layer.reason is not None or (chosen is not None and layer.index not in chosen):
        for part in parts:
            decline(runtime, layer, part, layer.reason or NOT_CHOSEN)
        return False
    known = parts.known.setdefault(runtime.kinds.get(layer.index) or runtime.kind(layer), Known())
    open_parts = known.others(parts) if known.repeated or known.left else [*parts]
    for one in tuple(known.repeated):
        if not (one.repeat.fits(slots) and _repeat(layer, one, slots)):
            known.repeated.remove(one)
            open_parts += one.parts
    for part, left in known.left:
        if left is not None and part.row is not None:
            served, shape = part.served or runtime.main, (1, part.end - part.begin, part.row.end)
            _count(served, layer, part, served.session.again(layer.index, left, shape).why)
    if not known.repeated and not open_parts:
        return False
    for part, _ in known.left:
        stock(part, query[part.begin : part.end], output[part.begin : part.end])
    if open_parts:
        _ask(runtime, layer, open_parts, known, query, output, slots, read, stock, slow)
    return True


def _repeat(layer: Layer, one: Repeated, slots: Sequence[Tensor]) -> bool:
    """Do again what parts came to in a layer before; False where it fails, which is noted."""
    try:
        one.repeat.run(layer.index, slots)
    except Exception as error:
        _survive(layer, error)
        one.served.session.note(LEFT.format(error=reason(error)))
        return False
    for part in one.parts:
        if part.chunk is not None:
            part.chunk.sparse += 1
            _end(part.chunk)
    return True


def _ask(
    runtime: Runtime,
    layer: Layer,
    parts: Sequence[Part],
    known: Known,
    query: Tensor,
    output: Tensor,
    slots: Sequence[Tensor],
    read: Read,
    stock: Stock,
    slow: bool,
) -> None:
    """Fill the output of parts of which nothing is known; `known` gets what they come to."""
    waiting: list[tuple[Part, AttentionCall, Tensor]] = []

    def settle() -> None:
        for part, filled, left in _outcomes(runtime, layer, waiting, slots, known, slow):
            if not filled:
                fill(part)
            if left is not None:
                known.left.append((part, left))
        waiting.clear()

    def fill(part: Part) -> None:
        stock(part, query[part.begin : part.end], output[part.begin : part.end])

    for part in parts:
        if part.row is None:
            fill(part)
            known.left.append((part, None))
            continue
        found = _call(runtime, layer, part, query[part.begin : part.end], read)
        if found is None:
            fill(part)
            continue
        call, copied = found
        waiting.append((part, call, output[part.begin : part.end].transpose(0, 1)[None]))
        if copied:  # keys and values are not kept for long
            settle()
    settle()


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
    runtime: Runtime,
    layer: Layer,
    waiting: Sequence[tuple[Part, AttentionCall, Tensor]],
    slots: Sequence[Tensor],
    known: Known,
    slow: bool,
) -> Iterator[tuple[Part, bool, Fallback | None]]:
    """Of each part whether its output is there, and if not, what leaves it to the host in the next layers; what one
    method serves runs together. known: gets what can be repeated."""
    by_method: dict[Served, list[tuple[Part, AttentionCall, Tensor, Prefill]]] = {}
    for part, call, out in waiting:
        if part.prefill is not None:
            by_method.setdefault(part.served or runtime.main, []).append((part, call, out, part.prefill))
    for served, some in by_method.items():
        asked = [(call, prefill, _rows_read(runtime, layer, part)) for part, call, _, prefill in some]
        repeats: list[Repeat] = []
        outcomes = served.session.run_many(asked, [out for _, _, out, _ in some], slots, repeats)
        for (part, *_), outcome in zip(some, outcomes, strict=True):
            if isinstance(outcome, Exception):  # before the host computes any: what failed may hold memory
                _fail(runtime, layer, part, outcome)
        if repeats:
            known.add(served, repeats, [part for part, *_ in some], sum(isinstance(one, Ran) for one in outcomes))
        for (part, call, out, _), outcome in zip(some, outcomes, strict=True):
            if isinstance(outcome, Exception):
                yield part, False, None
                continue
            try:
                filled = _filled(served, layer, part, call, out, outcome, slow)
            except Exception as error:
                _fail(runtime, layer, part, error)
                filled = False
            again = isinstance(outcome, Fallback) and outcome.small and not (outcome.chosen and slow)
            yield part, filled, outcome if again and isinstance(outcome, Fallback) else None


def _rows_read(runtime: Runtime, layer: Layer, part: Part) -> int | None:
    """Number of a part's last rows that anybody reads in this layer; None for all."""
    return 1 if layer.index == runtime.unread and part.row is not None and part.row.ends_alone else None


def _filled(
    served: Served, layer: Layer, part: Part, call: AttentionCall, out: Tensor, outcome: Outcome, slow: bool
) -> bool:
    """True if a part's output is there."""
    if isinstance(outcome, Fallback):
        _count(served, layer, part, outcome.why)
        found = _whole(served, layer, call) if outcome.chosen and slow else None
        if found is None:
            return False
        out.copy_(found)
        return True
    if part.chunk is not None:
        part.chunk.sparse += 1
        _end(part.chunk)
    return True


def _whole(served: Served, layer: Layer, call: AttentionCall) -> Tensor | None:
    """Dense attention by the library's kernels; where it fails the host computes the call, which is counted already."""
    try:
        return served.session.whole(call)
    except Exception as error:
        _survive(layer, error)
        served.session.note(f"dense attention is left to the host: {reason(error)}")
        return None


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
