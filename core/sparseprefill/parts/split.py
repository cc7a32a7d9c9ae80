"""Which parts a long call is cut into, so that what its stages hold at a time stays within a limit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, Literal, Protocol

from attrs import evolve, frozen

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

SPARE = 4
"""One part in so many of the limit stays free while a call runs in parts: for the LSE, for counting pairs, and for what
the part before has not yet let go. A round guess."""
ROWS = 2048
"""Calls are cut at multiples of it (and of the grain), so that a query tile or group of tiles lies in one part."""


@frozen
class Part:
    """Query heads and query rows of a call, as half-open ranges; all of both is the call itself."""

    heads: tuple[int, int]
    rows: tuple[int, int]

    def of(self, call: AttentionCall) -> AttentionCall:
        """The part as a call: views. Where rows are left out, so are the keys behind; it knows the prompt's end."""
        (head, end), (row, last) = self.heads, self.rows
        group = call.group
        kv = slice(head // group, -(-end // group))
        offset, lengths, prompt = call.geometry.q_offset, call.lengths, call.prompt_lengths
        keys = call.kv_len
        if (row, last) != (0, call.q.shape[2]):
            if prompt is None:  # of the call, which its parts no longer show
                behind = offset + call.q.shape[2]
                prompt = behind if lengths is None else lengths.clamp(max=behind)
            keys = offset + last
            lengths = None if lengths is None else lengths.clamp(max=keys)
        k, v = call.narrow(kv, keys)
        return evolve(
            call,
            q=call.q[:, head:end, row:last],
            k=k,
            v=v,
            sinks=None if call.sinks is None else call.sinks[head:end],
            q_offset=offset + row,
            lengths=lengths,
            prompt_lengths=prompt,
            first_head=call.first_head + head,
        )


class Cuttable(Protocol):
    """What decides about parts, as a Pipeline has it."""

    @property
    def grain(self) -> int | None:
        """Tokens at whose multiples rows may be cut, or None."""
        ...

    @property
    def head_scope(self) -> Literal["head", "group"] | None:
        """What is looked at to decide for a head; None for all heads."""
        ...

    def bound(self, call: AttentionCall) -> int:
        """Bytes that may be held for a call at once."""
        ...


def parts(pipeline: Cuttable, call: AttentionCall, limit: int | None) -> tuple[Part, ...]:
    """The fewest parts whose bounds keep to the limit, less `SPARE`, or the smallest that the stages allow.

    By groups of query heads that share a KV head first; then by rows, at multiples of the grain, where the pipeline
    has one and all batch rows begin at 0; then by query heads. Rows outside, heads inside: as chunks of a prompt, each
    cut by heads.
    """
    whole = Part((0, call.q.shape[1]), (0, call.q.shape[2]))
    if limit is None or pipeline.bound(call) <= limit:
        return (whole,)
    room = limit - limit // SPARE

    def fits(part: Part) -> bool:
        return pipeline.bound(part.of(call)) <= room

    sizes, rows = _head_sizes(pipeline, call), [whole.rows]
    together = [size for size in sizes if size >= call.group]
    size = next((n for n in together if fits(evolve(whole, heads=(0, n)))), None)
    if size is None and pipeline.grain is not None and call.starts is None:
        cuts = _cuts(call, lcm(pipeline.grain, ROWS))
        few = sizes[len(together) - 1 :]
        size = next((n for n in few if fits(Part((0, n), (cuts[-2], cuts[-1])))), few[-1])
        rows = _cut_rows(cuts, size, fits)
    if size is None:
        size = next((n for n in sizes if fits(evolve(whole, heads=(0, n)))), sizes[-1])
    heads = _even(call.q.shape[1], size, call.group)
    return tuple(Part(columns, one) for one in rows for columns in heads)


def _head_sizes(pipeline: Cuttable, call: AttentionCall) -> list[int]:
    """Numbers of query heads that a part may have, descending."""
    heads, group, scope = call.q.shape[1], call.group, pipeline.head_scope
    if scope is None:
        return [heads]
    inside = range(group - 1, 0, -1) if scope == "head" else ()
    return [*range(heads, 0, -group), *inside]


def _even(heads: int, size: int, group: int) -> list[tuple[int, int]]:
    """Ranges of about equally many heads, at most `size`: whole groups of a KV head, or parts of one."""
    if size >= group:
        groups = heads // group
        return [(a * group, b * group) for a, b in _ranges(groups, size // group)]
    inner = _ranges(group, size)
    return [(first + a, first + b) for first in range(0, heads, group) for a, b in inner]


def _ranges(total: int, size: int) -> list[tuple[int, int]]:
    count = -(-total // size)
    ends = [total * i // count for i in range(count + 1)]
    return list(pairwise(ends))


def _cuts(call: AttentionCall, unit: int) -> list[int]:
    """Rows at which the call may be cut, its first and its end among them."""
    offset, length = call.geometry.q_offset, call.q.shape[2]
    inside = range((offset // unit + 1) * unit - offset, length, unit)
    return [0, *inside, length]


def _cut_rows(cuts: list[int], heads: int, fits: Callable[[Part], bool]) -> list[tuple[int, int]]:
    """Ranges of as many rows as fit, at least those between two cuts."""
    at, found = 0, []
    while at < len(cuts) - 1:
        low, high = at + 1, len(cuts) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if fits(Part((0, heads), (cuts[at], cuts[middle]))):
                low = middle
            else:
                high = middle - 1
        found.append((cuts[at], cuts[low]))
        at = low
    return found
