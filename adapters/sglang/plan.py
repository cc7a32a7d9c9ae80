"""From SGLang's ForwardBatch to what runs sparse of it, once a step. Reads host copies only, never the device."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from attrs import define, field, frozen
from torch import Tensor

from ..serving.parts import Batch, Part, gaps
from ..serving.requests import Row
from ..serving.wishes import Unknown
from . import known
from .narrow import Rows, narrow, objection
from .pages import in_one, table_of
from .runtime import Runtime

SERVED, UNSERVED = ("EXTEND", "MIXED"), ("SPLIT_PREFILL", "DLLM_EXTEND")
"""SGLang's modes of batches with prompts; all others are of drafts, or decode."""


@frozen(eq=False)
class Rest:
    """Requests of a step beside those that run sparse. batch: of them alone."""

    rows: Rows
    batch: Any


@define(eq=False)
class Step:
    """The sparse part of a step.

    parts: one a request. tables: the pages of each part's request, by its place in the batch. rest: the others, if
    there are any. tokens: of the whole batch. complete: ids of the prefills that end with the step.
    """

    parts: Batch
    tables: Mapping[int, Tensor]
    tokens: int
    complete: tuple[str, ...]
    rest: Rest | None = field(default=None)


def plan(runtime: Runtime, batch: Any, slots: Tensor, page: int) -> Step | None:
    """The sparse part of a batch; None where SGLang's own attention computes all of it.

    slots: int32 ``[requests, context]``, SGLang's ``req_to_token``. page: slots of a page.
    """
    rids, starts, counts = batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    mode = str(batch.forward_mode.name)
    if rids is None or starts is None or counts is None or mode not in SERVED:
        if mode in UNSERVED:
            runtime.leave(f"batches of mode {mode}: no method knows them")
        return None
    why = objection(batch)
    requests = [known.find(rid) for rid in rids]
    places, rows = list[int](), list[Row]()
    for i, (rid, request) in enumerate(zip(rids, requests, strict=True)):
        prompt = known.prompt(request)
        if counts[i] == 1 and prompt is not None and starts[i] >= prompt:
            continue  # it decodes
        asked = known.asked(request) if why is None else Unknown(why)
        rows.append(Row(starts[i], starts[i] + counts[i], rid, prompt, asked))
        places.append(i)
    runtime.coming = frozenset(row.name for row in rows if row.name is not None)
    prefills = set(places)
    decoding = {rid: starts[i] for i, rid in enumerate(rids) if i not in prefills}
    found = runtime.prefills(
        object(), rows, lambda wanted: {one: decoding[one] for one in wanted if one in decoding}, runtime.layers
    )
    sparse = {i: n for n, i in enumerate(places) if runtime.chunks[n] is not None}
    ending = {one.rid: i in sparse for i, one in enumerate(requests) if one is not None and known.complete(one)}
    for rid, needed in ending.items():
        if not needed:  # such as a prompt whose last chunk is too short
            runtime.requests.end(rid)
    if not sparse:
        return None
    bounds = [0, *accumulate(counts)]
    parts, tables = Batch(), dict[int, Tensor]()
    for i, n in sparse.items():
        part = Part(i, i + 1, bounds[i], bounds[i + 1], rows[n], found[n], runtime.chunks[n], runtime.serving(rows[n]))
        parts.append(part)
        tables[i] = table_of(_slots(slots, batch, requests[i], i), rows[n].end, page)
    if len(tables) > 1:
        tables = dict(zip(tables, in_one(list(tables.values())), strict=True))
    step = Step(parts, tables, bounds[-1], tuple(rid for rid, needed in ending.items() if needed))
    others = gaps(list(sparse), len(counts))
    if others:
        left = Rows.of(others, bounds)
        step.rest = Rest(left, narrow(batch, left))
    return step


def _slots(slots: Tensor, batch: Any, request: Any, i: int) -> Tensor:
    """A request's row of ``req_to_token``: a view where the host knows which."""
    at = getattr(getattr(request, "kv", None), "req_pool_idx", None)
    return slots[at] if isinstance(at, int) else slots.index_select(0, batch.req_pool_indices[i : i + 1])[0]
