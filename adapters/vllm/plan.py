"""From the host's common metadata of a step to its parts. Reads host copies only, never the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .requests import Row
from .runtime import Runtime
from .split import Part, narrow, runs


def plan(runtime: Runtime, common: Any, stock: Callable[[Any], Any]) -> list[Part] | None:
    """The parts of a batch, or None where the host computes all of it.

    common: vLLM's CommonAttentionMetadata. stock: makes the host's own metadata.
    """
    prefilling, bound = getattr(common, "is_prefilling", None), getattr(common, "seq_lens_cpu_upper_bound", None)
    if prefilling is None or bound is None or common.causal is not True:
        return None
    count = min(int(common.num_reqs), len(prefilling))  # rows that pad a batch come last
    starts, lengths = common.query_start_loc_cpu[: count + 1].tolist(), bound[:count].tolist()
    asked = prefilling[:count].tolist()
    wanted = [i for i in range(count) if asked[i] or len(runtime.requests)]
    names = runtime.names.of(common, count) if wanted else []
    prompts = {i: runtime.names.prompt(names[i]) for i in wanted}
    every = {i: Row(lengths[i] - starts[i + 1] + starts[i], lengths[i], names[i], prompts[i]) for i in wanted}
    rows, decoding = ({i: row for i, row in every.items() if asked[i] is kind} for kind in (True, False))
    found = runtime.prefills(common.query_start_loc_cpu, list(rows.values()), list(decoding.values()))
    prefills = dict(zip(rows, found, strict=True))
    sparse = [asked[i] and starts[i + 1] - starts[i] >= runtime.options.min_query for i in range(count)]
    if not any(sparse):
        return None
    parts = []
    for first, last in runs(sparse):
        make = partial(_stock, stock, common, first, last, starts, lengths)
        part = Part(first, last, starts[first], starts[last], make=make)
        if sparse[first]:
            part.row, part.prefill = rows[first], prefills[first]
            part.reason = _reason(common, first)
        parts.append(part)
    return parts


def _stock(stock: Callable[[Any], Any], common: Any, *where: Any) -> Any:
    return stock(narrow(common, *where))


def _reason(common: Any, i: int) -> str | None:
    """Why a request stays dense whatever the layer, or None."""
    if (getattr(common, "mm_req_doc_ranges", None) or {}).get(i):
        return "parts of the prompt attend in both directions (multimodal prefix)"
    if getattr(common, "rswa_prefix_lens", None) is not None:
        return "the model attends in a sliding window behind a prefix (R-SWA)"
    if getattr(common, "dcp_local_seq_lens", None) is not None:
        return "the context is spread over devices (context parallelism)"
    return None
