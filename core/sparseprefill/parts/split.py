"""The parts a long call is cut into, so that what its stages hold at a time stays within a limit, and their record."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Literal, Protocol

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import MaskError
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Kernel, Result, Rounding, Skipped

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
    """The properties of a Pipeline that decide about parts."""

    @property
    def grain(self) -> int | None:
        """Tokens at whose multiples rows may be cut, or None."""
        ...

    @property
    def head_scope(self) -> Literal["head", "group"] | None:
        """Heads that are looked at to decide for one; None for all."""
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
        cuts = _cuts(call, math.lcm(pipeline.grain, ROWS))
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
        parts = [Part((0, heads), (cuts[at], end)) for end in cuts[at + 1 :]]
        number = bisect_left(parts, True, lo=1, key=lambda part: not fits(part))
        found.append(parts[number - 1].rows)
        at += number
    return found


KEPT = 256 << 20
"""Bytes of index lists that the masks of all parts may hold to be kept."""


@define(eq=False)
class Recorder:
    """Makes the record while the parts run: pairs counted on the device, and masks as long as there is room.

    geometry: of the whole call. masks: each part with its masks, disjoint ones; None once they were too large to keep.
    kernels: what computed the parts, each once. skipped: what they left out together, who voted being the last part's.
    rounded: the largest errors of those in a reduced precision.
    """

    geometry: Geometry
    pairs: Tensor = field(init=False)
    skipped: Skipped | None = None
    rounded: Rounding | None = None
    count: int = 0
    held: int = 0
    masks: list[tuple[Part, tuple[SparseMask, ...]]] | None = field(factory=list)
    kernels: dict[Kernel, None] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        g = self.geometry
        self.pairs = torch.zeros(g.batch, g.heads, dtype=torch.int64, device=g.device)

    def add(self, part: Part, masks: tuple[SparseMask, ...], result: Result) -> None:
        """Count one part's masks (`Plan.computed`) and what its result says of them, without host synchronisation, and
        keep the masks while there is room."""
        heads = slice(*part.heads)
        if result.skipped is not None:
            pairs = torch.zeros_like(self.pairs) if self.skipped is None else self.skipped.pairs
            pairs[:, heads] += result.skipped.pairs
            self.skipped = evolve(result.skipped, pairs=pairs)
        if result.rounded is not None:
            fresh = self.pairs.new_zeros(self.pairs.shape, dtype=torch.float32)
            errors = fresh if self.rounded is None else self.rounded.errors
            errors[:, heads] = torch.maximum(errors[:, heads], result.rounded.errors)
            self.rounded = evolve(result.rounded, errors=errors)
        self.kernels.update(dict.fromkeys(result.kernels))
        for mask in masks:
            self.pairs[:, heads] += mask.pairs()
        self.count += 1
        self.held += sum(mask.nbytes for mask in masks)
        if self.held > KEPT:
            self.masks = None
        elif self.masks is not None:
            self.masks.append((part, masks))

    def mask(self) -> SparseMask:
        """Everything computed, as one mask of the call; MaskError where the parts' masks were not kept."""
        if self.masks is None:
            raise MaskError(
                f"the call ran in {self.count} parts, and their masks were not kept (more than {KEPT >> 20} MiB): "
                "density is there; for the mask, run it in one part with attrs.evolve(pipeline, workspace=None)"
            )
        columns = zip(*([(part, mask) for mask in masks] for part, masks in self.masks), strict=True)
        return reduce(or_, [_joined(self.geometry, pieces) for pieces in columns])


def _joined(geometry: Geometry, pieces: Sequence[tuple[Part, SparseMask]]) -> SparseMask:
    """One mask of masks by parts, which come rows outside, heads inside; all on one grid, and cut along it."""
    tile_q = pieces[0][1].tile_q
    cuts = {part.rows[0] + geometry.q_offset for part, _ in pieces if part.rows[0]}
    # Refiners split groups, where they widen some of their rows; and a cut may lie inside a group.
    group = math.gcd(*(mask.group for _, mask in pieces), *(cut // tile_q for cut in cuts if cut % tile_q == 0))
    widths = [mask.stripe_width for _, mask in pieces if mask.stripes is not None]
    width = math.gcd(*widths) if widths else 1
    pieces = [(part, mask.regrouped(group).with_stripe_width(width)) for part, mask in pieces]
    masks = [mask for _, mask in pieces]
    first = masks[0]
    grid = (first.tile_q, first.tile_k, first.group)
    striped = any(mask.stripes is not None for mask in masks)
    rows = first.group_rows if striped else first.tile_q
    if any((mask.tile_q, mask.tile_k, mask.group) != grid for mask in masks) or any(cut % rows for cut in cuts):
        raise MaskError("the parts' masks lie on grids that cannot be joined; parts are cut inside a tile or group")
    return evolve(
        first,
        geometry=geometry,
        tiles=_join([(part, mask.tiles, mask.geometry.tile_rows(mask.tile_q)) for part, mask in pieces]),
        stripes=_join([(part, mask.stripes, mask.geometry.tile_rows(mask.group_rows)) for part, mask in pieces]),
        disjoint=all(mask.disjoint for mask in masks),
    )


def _join(pieces: list[tuple[Part, IndexLists | None, int]]) -> IndexLists | None:
    """Lists side by side; where a part has none, empty ones of so many rows."""
    found = next((lists for _, lists, _ in pieces if lists is not None), None)
    if found is None:
        return None
    batch, device = found.counts.shape[0], found.counts.device
    by_rows: dict[int, list[IndexLists]] = {}
    for part, given, rows in pieces:
        empty = IndexLists.empty(batch, part.heads[1] - part.heads[0], rows, device)
        by_rows.setdefault(part.rows[0], []).append(empty if given is None else given)
    return IndexLists.joined([IndexLists.joined(heads, 1) for heads in by_rows.values()], 2)
