"""From the host's common metadata of a step to its parts. Reads host copies only, never the device.

Rows that decode wait for it, hundreds of them where a prompt or two is computed: no statement here runs once for each.
Their lists are made and searched by what is not Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any

from ..serving.parts import Batch, Part, gaps, runs
from ..serving.requests import Row
from ..serving.wishes import Unknown
from .runtime import Runtime
from .split import narrow, objection


def plan(runtime: Runtime, common: Any, stock: Callable[[Any], Any], layers: int = 0) -> Batch | None:
    """The parts of a batch, or None where the host computes all of it.

    common: vLLM's CommonAttentionMetadata. stock: makes the host's own metadata. layers: that get the parts; 0 where
    nobody knows.
    """
    prefilling, bound = getattr(common, "is_prefilling", None), getattr(common, "seq_lens_cpu_upper_bound", None)
    if prefilling is None or bound is None or common.causal is not True:
        return None
    why = objection(common)
    count = min(int(common.num_reqs), len(prefilling))  # rows that pad a batch come last
    places = list(compress(range(count), prefilling[:count].tolist()))
    rows: list[Row] = []
    names: list[str | None] = []
    starts: list[int] = []
    lengths: list[int] = []
    if places or len(runtime.requests):
        names = runtime.names.of(common, count)
        starts, lengths = common.query_start_loc_cpu[: count + 1].tolist(), bound[:count].tolist()
        for i in places:
            name, start = names[i], lengths[i] - starts[i + 1] + starts[i]
            asked = runtime.names.asked(name) if why is None else Unknown(why)
            alone = runtime.options.skip_unread and runtime.names.ends_alone(name)
            rows.append(Row(start, lengths[i], name, runtime.names.prompt(name), asked, alone))
    decoding = partial(_decoding, names, places, starts, lengths)
    found = runtime.prefills(common.query_start_loc_cpu, rows, decoding, layers)
    sparse = {i: n for n, i in enumerate(places) if runtime.chunks[n] is not None}
    if not sparse or why is not None:
        return None
    parts = Batch()
    for first, last in runs(sparse, count):
        make = partial(_stock, stock, common, first, last, starts, lengths)
        part = Part(first, last, starts[first], starts[last], make=make)
        if first in sparse:
            n = sparse[first]
            part.row, part.prefill, part.chunk = rows[n], found[n], runtime.chunks[n]
            part.served = runtime.serving(rows[n])
            part.reason = _reason(common, first)
        parts.append(part)
    return parts


def _decoding(
    names: Sequence[str | None],
    places: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    wanted: Iterable[str | None],
) -> dict[str | None, int]:
    """The wanted requests that have a row which is no prefill, and the first token of that row.

    names, lengths: of all rows; places: of the prefills.
    """
    at: dict[str | None, int] = {}
    for first, last in gaps(places, len(lengths)):
        at.update(zip(names[first:last], range(first, last), strict=True))
    rows = ((name, at[name]) for name in wanted if name in at)
    return {name: lengths[i] - starts[i + 1] + starts[i] for name, i in rows}


def _stock(stock: Callable[[Any], Any], common: Any, *where: Any) -> Any:
    return stock(narrow(common, *where))


def _reason(common: Any, i: int) -> str | None:
    """Reason for which a request stays dense whatever the layer, or None."""
    if (getattr(common, "mm_req_doc_ranges", None) or {}).get(i):
        return "parts of the prompt attend in both directions (multimodal prefix)"
    if getattr(common, "rswa_prefix_lens", None) is not None:
        return "the model attends in a sliding window after a prefix (R-SWA)"
    if getattr(common, "dcp_local_seq_lens", None) is not None:
        return "the context is spread over devices (context parallelism)"
    return None
