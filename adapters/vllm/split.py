"""A batch of the host in parts: each request that runs sparse on its own, the rest in runs for the host's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from attrs import define, field

from ..session.session import Prefill
from .requests import Row
from .served import Served
from .tally import Chunk

# Tensors and arrays with one entry a request that the host's metadata may hold.
PER_REQUEST = (
    *("is_prefilling", "seq_lens_cpu_upper_bound", "dcp_local_seq_lens", "dcp_local_seq_lens_cpu_upper_bound"),
    *("req_idx", "rswa_prefix_lens", "replayssm_decode_base_cpu", "encoder_seq_lens", "encoder_seq_lens_cpu"),
)
CACHES = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")


@define(eq=False)
class Part:
    """Requests `first` to `last` (exclusive) of a batch, whose query rows are `begin` to `end`.

    row, prefill, chunk: of the one request of a part that runs sparse; None for a part that the host computes. served:
    what runs it. reason: why such a request stays dense in all layers, or None. make: the host's own metadata for it.
    """

    first: int
    last: int
    begin: int
    end: int
    row: Row | None = None
    prefill: Prefill | None = None
    chunk: Chunk | None = None
    served: Served | None = None
    reason: str | None = None
    make: Callable[[], Any] | None = None
    _made: list[Any] = field(factory=list, init=False)

    def metadata(self) -> Any:
        """The host's own metadata for this part, made once, when the first layer needs it."""
        if not self._made and self.make is not None:
            self._made.append(self.make())
        return self._made[0]


def runs(sparse: Iterable[int], count: int) -> list[tuple[int, int]]:
    """Half-open ranges of `count` rows: a sparse row alone, neighbours of the rest together. sparse: ascending."""
    alone = tuple(sparse)
    return sorted([*((i, i + 1) for i in alone), *gaps(alone, count)])


def gaps(rows: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Half-open ranges of those of `count` rows that are not among `rows`, which ascend."""
    return [(a, b) for a, b in zip((0, *(i + 1 for i in rows)), (*rows, count), strict=True) if a < b]


def narrow(common: Any, first: int, last: int, starts: Sequence[int], lengths: Sequence[int]) -> Any:
    """The host's common metadata for requests `first` to `last` (exclusive).

    starts: first query row of each request, and the end of the last; lengths: keys of each. Both are on the host.
    """
    begin, end = starts[first], starts[last]
    kind: Any = type(common)
    names = _fields(kind)
    loc, loc_cpu = (x[first : last + 1] for x in (common.query_start_loc, common.query_start_loc_cpu))
    changed: dict[str, Any] = {
        "query_start_loc": loc - begin if begin else loc,  # a launch on the device
        "query_start_loc_cpu": loc_cpu - begin if begin else loc_cpu,
        "seq_lens": common.seq_lens[first:last],
        "num_reqs": last - first,
        "num_actual_tokens": end - begin,
        "max_query_len": int(loc_cpu.diff().max()),
        "max_seq_len": max(lengths[first:last]),
        "block_table_tensor": common.block_table_tensor[first:last],
        "slot_mapping": common.slot_mapping[begin:end],
    }
    for name in names.intersection(PER_REQUEST):
        value = getattr(common, name)
        changed[name] = None if value is None else value[first:last]
    if getattr(common, "positions", None) is not None:
        changed["positions"] = common.positions[..., begin:end]
    ranges = getattr(common, "mm_req_doc_ranges", None)
    if ranges is not None:
        changed["mm_req_doc_ranges"] = {i - first: spans for i, spans in ranges.items() if first <= i < last}
    return dataclasses.replace(common, **changed, **dict.fromkeys(names.intersection(CACHES)))


@cache
def _fields(kind: Any) -> frozenset[str]:
    return frozenset(one.name for one in dataclasses.fields(kind))
