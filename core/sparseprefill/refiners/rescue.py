"""Tiles kept whatever the estimator says: local band, sink, stride, random (BFLA, section 3.3).

Every rule looks at absolute tile indices alone, so the rescued set does not depend on how a prompt is cut into chunks.
Each takes `tile`: its tile size in tokens, by default the tiles of the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import field, frozen

from sparseprefill.mask_math import diagonal_map
from sparseprefill.refiners import hashing
from sparseprefill.refiners.widen import grid_of, widen
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

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the band."""
        grid = tile_q, tile_k = grid_of(plan, self.tile)
        geometry = call.geometry
        first = torch.div(geometry.tiles(tile_q) * tile_q, tile_k, rounding_mode="floor")[..., None]
        column = torch.arange(geometry.tile_columns(tile_k), device=geometry.device)
        before = (column < first) & (column >= first - self.tiles)
        return widen(call, plan, (before | diagonal_map(geometry, tile_q, tile_k))[:, None], grid)


@frozen
class Sink:
    """Keeps the first `tiles` key tiles (BFLA, eq. 16)."""

    tiles: int = field(validator=whole(0))
    tile: int | None = field(default=None, kw_only=True, validator=maybe(whole()))
    grain: ClassVar[int] = 1

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the first tiles."""
        grid = grid_of(plan, self.tile)
        column = torch.arange(call.geometry.tile_columns(grid[1]), device=call.q.device)
        return widen(call, plan, (column < self.tiles)[None, None, None], grid)


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

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds a tile in `every`."""
        grid = grid_of(plan, self.tile)
        phase = hashing.query_hash(call.geometry, grid[0], hashing.STRIDE, self.seed, call.layer) % self.every
        column = torch.arange(call.geometry.tile_columns(grid[1]), device=call.q.device) % self.every
        keep = column == ((self.every - phase) % self.every)[..., None]
        return widen(call, plan, keep, grid)


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

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the share."""
        grid = grid_of(plan, self.tile)
        states = hashing.query_hash(call.geometry, grid[0], hashing.RANDOM, self.seed, call.layer)
        bound = int(self.share * 2**32)
        return widen(call, plan, hashing.below(states, call.geometry.tile_columns(grid[1]), bound), grid)
