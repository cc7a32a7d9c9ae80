"""Some requests of a batch, in vLLM's metadata."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from sparseprefill.errors import AttachError

PER_REQUEST = (
    *("is_prefilling", "seq_lens_cpu_upper_bound", "dcp_local_seq_lens", "dcp_local_seq_lens_cpu_upper_bound"),
    *("req_idx", "rswa_prefix_lens", "replayssm_decode_base_cpu", "encoder_seq_lens", "encoder_seq_lens_cpu"),
    *("dcp_local_seq_lens_cpu", "_seq_lens_cpu", "_num_computed_tokens_cpu"),  # of vLLM 0.29
)
"""Fields of the host's metadata with one entry a request."""
CACHES = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
"""Fields that the host fills when they are None."""
CUT = (
    *("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len"),
    *("max_seq_len", "block_table_tensor", "slot_mapping", "positions", "mm_req_doc_ranges"),
)
"""Fields of which `narrow` knows otherwise what a part of a batch has in them."""
WHOLE = ("causal", "logits_indices_padded", "num_logits_indices", "max_logits_per_req")
"""Fields that a part has from its batch; the last three only where `is_prefilling` is None."""
UNCUT = "vLLM's metadata say something that this version does not know: {fields}"
KNOWN = frozenset((*PER_REQUEST, *CACHES, *CUT, *WHOLE))
log = logging.getLogger(__name__)


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


def check_fields(kind: Any) -> None:
    """Say in the log which fields of the host's metadata nobody here knows: a batch that has something in them runs
    dense. AttachError for one that every batch has something in."""
    always = [name for name, default in _unknown(kind) if default is dataclasses.MISSING]
    if always:
        raise AttachError(f"{UNCUT.format(fields=', '.join(always))}, so no batch could be cut: use an older vLLM")
    names = ", ".join(name for name, _ in _unknown(kind))
    if names:
        log.warning("sparseprefill: batches whose metadata say something under %s will run dense", names)


def objection(common: Any) -> str | None:
    """Reason for which a batch cannot be cut, or None: a field that nobody here knows says something."""
    kind: Any = type(common)
    said = [name for name, default in _unknown(kind) if _says(getattr(common, name), default)]
    return UNCUT.format(fields=", ".join(said)) if said else None


def _says(value: object, default: object) -> bool:
    return value is not default and not (isinstance(value, bool | int | float | str) and value == default)


@cache
def _unknown(kind: Any) -> tuple[tuple[str, object], ...]:
    """Fields of the host's metadata that `narrow` does not know, with their defaults."""
    return tuple((one.name, one.default) for one in dataclasses.fields(kind) if one.name not in KNOWN)
