"""Some requests of a batch, as a batch of SGLang's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

BY_REQUEST = (
    *("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "orig_seq_lens"),
    *("extend_seq_lens", "extend_prefix_lens", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "rids", "lora_ids"),
)
"""Fields with one entry a request that attention reads."""
BY_TOKEN = ("input_ids", "out_cache_loc", "positions")
"""Fields with one entry a token that attention reads."""
UNCUT = (
    *("encoder_lens", "spec_info", "tbo_parent_token_range", "tbo_children", "attn_cp_metadata", "attn_dcp_metadata"),
    *("dcp_kv_mask", "encoder_swa_row_floor", "multi_item_delimiter_indices", "decision_layouts"),
)
"""Fields by which a batch attends in a way of its own."""


@frozen
class Rows:
    """Requests of a batch. ranges: half-open, ascending. tokens: the ranges of their tokens."""

    ranges: tuple[tuple[int, int], ...]
    tokens: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]], starts: Sequence[int]) -> Rows:
        """starts: the first token of each request, and the end of the last."""
        return cls(tuple(ranges), tuple((starts[a], starts[b]) for a, b in ranges))

    def take_tokens(self, x: Any) -> Any:
        """Entries of a tensor with one entry a token: a view where they are neighbours."""
        return _cut(x, self.tokens)

    def put_tokens(self, x: Tensor, into: Tensor) -> None:
        """Their entries into a tensor with one entry a token of the whole batch."""
        begin = 0
        for first, last in self.tokens:
            into[first:last] = x[begin : begin + last - first]
            begin += last - first


def objection(batch: Any) -> str | None:
    """Reason for which requests of a batch cannot be computed by themselves, or None."""
    said = [name for name in UNCUT if getattr(batch, name, None) is not None]
    return f"the batch has {', '.join(said)}" if said else None


def narrow(batch: Any, rows: Rows) -> Any:
    """A ForwardBatch of these requests alone, whose keys and values are in the pool. Reads no value of the device."""
    made = copy.copy(batch)
    for name in BY_REQUEST:
        setattr(made, name, _cut(getattr(batch, name, None), rows.ranges))
    for name in BY_TOKEN:
        setattr(made, name, rows.take_tokens(getattr(batch, name, None)))
    lengths = made.extend_seq_lens_cpu
    made.batch_size = len(lengths)
    made.extend_num_tokens = made.global_num_token_non_padded_cpu = sum(lengths)
    made.seq_lens_sum = sum(made.extend_prefix_lens_cpu) + sum(lengths)
    ends = torch.cumsum(made.extend_seq_lens, 0, dtype=batch.extend_start_loc.dtype)
    made.extend_start_loc = ends - made.extend_seq_lens
    return made


def _cut(x: Any, ranges: Sequence[tuple[int, int]]) -> Any:
    if x is None:
        return None
    found = [x[first:last] for first, last in ranges]
    if len(found) == 1:
        return found[0]
    return torch.cat(found) if isinstance(x, Tensor) else [one for some in found for one in some]
