"""Tiles kept whatever the estimator says: local band, sink, stride, random (BFLA, section 3.3), and the last rows.

Every rule looks at absolute tile indices alone, so the rescued set does not depend on how a prompt is cut into chunks.
Each takes `tile`: its tile size in tokens, by default the tiles of the plan. A plan collects rules (`Plan.keep`).
`GqaUnion` keeps what any head of a group selects.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.tile_map import RANDOM, STRIDE, Random, Rows, Stride, hash_of_layer
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan
from sparseprefill.stages import HeadScope
from sparseprefill.validate import maybe, number, tokens, whole

SEEDS = whole(0, 2**63 - 1)
PER_TILE, PER_PAIR = 64, 16
"""Bytes of `DenseRows.workspace`: of a head for each query tile, and of all heads for each pair of tiles."""


@frozen
class _Rule:
    """Decides for each head and tile by its place."""

    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True


@frozen
class LocalBand(_Rule):
    """Keeps the diagonal and the `tiles` key tiles before it (BFLA, eq. 15)."""

    tiles: int = field(validator=whole(0))
    tile: int | None = field(default=None, kw_only=True, validator=maybe(tokens()))

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the band."""
        return plan.keep(self.tile, band=self.tiles)


@frozen
class Sink(_Rule):
    """Keeps the first `tiles` key tiles (BFLA, eq. 16)."""

    tiles: int = field(validator=whole(0))
    tile: int | None = field(default=None, kw_only=True, validator=maybe(tokens()))

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the first tiles."""
        return plan.keep(self.tile, sink=self.tiles)


@frozen
class StrideRescue(_Rule):
    """Keeps every `every`-th key tile of each query tile, from a phase of its own (BFLA, eq. 18).

    The tile (i, j) of a head is kept where ``(j + hash(seed, layer, head, i)) % every == 0``. So one of any `every`
    neighbours in a row of tiles is kept, and different rows, heads and layers keep different ones.
    """

    every: int = field(validator=whole())
    seed: int = field(default=0, validator=SEEDS)
    tile: int | None = field(default=None, kw_only=True, validator=maybe(tokens()))

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds a tile in `every`."""
        rule = Stride(self.every, hash_of_layer(STRIDE, self.seed, call.layer))
        return plan.keep(self.tile, stride=rule, first_head=call.first_head)


@frozen
class RandomRescue(_Rule):
    """Keeps a `share` of the tiles, by an integer hash (BFLA, eq. 19).

    The tile (i, j) of a head is kept where ``hash(seed, layer, head, i, j) < share * 2**32``: the same bits on every
    device.
    """

    share: float = field(validator=number(0.0, 1.0))
    seed: int = field(default=0, validator=SEEDS)
    tile: int | None = field(default=None, kw_only=True, validator=maybe(tokens()))

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the share."""
        bound = int(self.share * 2**32)
        if bound == 0:
            return plan
        rule = Random(bound, hash_of_layer(RANDOM, self.seed, call.layer))
        return plan.keep(self.tile, random=rule, first_head=call.first_head)


@frozen
class DenseRows(_Rule):
    """Gives every key to the last `last` query rows of each batch row's prompt, and to real rows behind it.

    Whole query tiles are rounded up: with tiles of 128 tokens, 1 to 128 rows make one tile dense where the prompt ends
    with a tile, and two where the rows reach into the one before. tile: size in tokens, by default the tiles of the
    plan, on which it is cheapest.

    The prompt ends where the call says (`AttentionCall.prompt_lengths`). Then a prompt in chunks gets the mask of the
    whole prompt, wherever it is cut: hence the grain. Of a call that does not say, the last rows become dense, so in
    chunks those of every chunk.
    """

    last: int = field(validator=whole())
    tile: int | None = field(default=None, kw_only=True, validator=maybe(tokens()))

    @property
    def tail(self) -> int:
        """The rows that this stage makes dense, so that adapters need not add them: see `stages`."""
        return self.last

    def workspace(self, call: AttentionCall) -> int:
        """The bytes of one map of tiles for all heads, and of where each head's lists begin.

        What differs by head is a rule of the estimator's own map, or lists, whose bound it is.
        """
        geometry, size = call.geometry, 128 if self.tile is None else self.tile
        rows = geometry.tile_rows(size)
        each = rows * (geometry.tile_columns(size) * PER_PAIR + geometry.heads * PER_TILE)
        return geometry.batch * each

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds all tiles of the last rows; where none of them is in the call, the plan itself."""
        rows = self._tiles(call, plan.grid(self.tile)[0])
        if not isinstance(rows, Tensor) and rows[0] >= rows[1]:
            return plan
        return plan.keep(self.tile, dense=rows)

    def _tiles(self, call: AttentionCall, tile: int) -> Rows:
        """The query tiles that become dense. Nothing is read on the host: numbers where sizes tell, else a tensor."""
        geometry, prompt = call.geometry, call.prompt_lengths
        if geometry.starts is None and geometry.lengths is None and not isinstance(prompt, Tensor):
            behind = geometry.q_offset + geometry.q_len
            first = (behind if prompt is None else prompt) - self.last
            return max(first // tile, 0), -(-behind // tile)
        *_, end = geometry.token_range()
        begin = torch.zeros_like(end) + (end if prompt is None else prompt) - self.last
        ends = torch.stack([begin, end + tile - 1], -1)
        return (ends // tile).clamp(min=0).to(torch.int32)


@frozen
class GqaUnion:
    """Gives every query head what any head of its GQA group selects, the carry's region included.

    Tiles and stripes are united through bool maps, ``[B, Hq, R, C]`` and ``[B, Hq, G, Nkv]``. Where the carry's region
    differs between heads (`IndexLists.same_heads` does not say otherwise), a head gets the regions of the others too.
    """

    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "group"
    repeats: ClassVar[bool] = True

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Unites the masks of each group."""
        if call.group == 1:
            return plan
        mask = over_group(plan.mask, call.group)
        if plan.carry is not None:
            region = plan.carry.region
            if any(lists is not None and not lists.same_heads for lists in (region.tiles, region.stripes)):
                mask = (mask | over_group(region, call.group)) - region
        return evolve(plan, mask=mask)


def over_group(mask: SparseMask, group: int) -> SparseMask:
    """The union over each `group` consecutive heads, given to all of them."""
    tiles = mask.as_map().united(group) if mask.has_tiles else None
    stripes = mask.stripes
    if stripes is not None and not stripes.same_heads:
        columns = mask.stripe_map(mask.stripe_width).unflatten(1, (-1, group)).any(2)
        stripes = IndexLists.from_map(columns).for_group(group)
    return evolve(mask, tiles=tiles, stripes=stripes, disjoint=False)
