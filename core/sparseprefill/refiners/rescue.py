"""Tiles kept whatever the estimator says: local band, sink, stride, random (BFLA, section 3.3).

Every rule looks at absolute tile indices alone, so the rescued set does not depend on how a prompt is cut into chunks.
Each takes `tile`: its tile size in tokens, by default the tiles of the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from sparseprefill.mask import hashing
from sparseprefill.mask.tile_map import Random, Stride
from sparseprefill.stages import HeadScope
from sparseprefill.validate import maybe, number, whole

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Plan

SEEDS = whole(0, 2**63 - 1)


@frozen
class LocalBand:
    """Keeps the diagonal and the `tiles` key tiles before it (BFLA, eq. 15)."""

    tiles: int = field(validator=whole(0))
    tile: int | None = field(default=None, kw_only=True, validator=maybe(whole()))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the band."""
        return plan.keep(self.tile, band=self.tiles)


@frozen
class Sink:
    """Keeps the first `tiles` key tiles (BFLA, eq. 16)."""

    tiles: int = field(validator=whole(0))
    tile: int | None = field(default=None, kw_only=True, validator=maybe(whole()))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the first tiles."""
        return plan.keep(self.tile, sink=self.tiles)


@frozen
class StrideRescue:
    """Keeps every `every`-th key tile of each query tile, from a phase of its own (BFLA, eq. 18).

    The tile (i, j) of a head is kept where ``(j + hash(seed, layer, head, i)) % every == 0``. So one of any `every`
    neighbours in a row of tiles is kept, and different rows, heads and layers keep different ones.
    """

    every: int = field(validator=whole())
    seed: int = field(default=0, validator=SEEDS)
    tile: int | None = field(default=None, kw_only=True, validator=maybe(whole()))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds a tile in `every`."""
        rule = Stride(self.every, hashing.begin(hashing.STRIDE, self.seed, call.layer))
        return plan.keep(self.tile, stride=rule, first_head=call.first_head)


@frozen
class RandomRescue:
    """Keeps a `share` of the tiles, by an integer hash (BFLA, eq. 19).

    The tile (i, j) of a head is kept where ``hash(seed, layer, head, i, j) < share * 2**32``: the same bits on every
    device.
    """

    share: float = field(validator=number(0.0, 1.0))
    seed: int = field(default=0, validator=SEEDS)
    tile: int | None = field(default=None, kw_only=True, validator=maybe(whole()))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the share."""
        bound = int(self.share * 2**32)
        if bound == 0:
            return plan
        rule = Random(bound, hashing.begin(hashing.RANDOM, self.seed, call.layer))
        return plan.keep(self.tile, random=rule, first_head=call.first_head)
