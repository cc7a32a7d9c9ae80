"""Dense attention for the last rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import field, frozen

from sparseprefill.mask.mask import SparseMask
from sparseprefill.stages import HeadScope
from sparseprefill.validate import maybe, whole

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Plan


@frozen
class DenseRows:
    """Gives the last `last` real query rows of each batch row every key, rounded up to whole query tiles.

    It has no grain: in a prompt that comes in chunks, the last rows of every chunk become dense. tile: size in tokens,
    by default the tiles of the plan.
    """

    last: int = field(validator=whole())
    tile: int | None = field(default=None, kw_only=True, validator=maybe(whole()))
    head_scope: ClassVar[HeadScope] = "head"

    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds all tiles of the last rows."""
        grid = tile_q, tile_k = plan.grid(self.tile)
        geometry = call.geometry
        first = geometry.first_position()
        behind = torch.minimum(first + geometry.q_len, geometry.key_counts())[:, None]
        tile = geometry.tiles(tile_q)
        dense = ((tile + 1) * tile_q > behind - self.last) & (tile * tile_q < behind)
        columns = geometry.tile_columns(tile_k)
        return plan.widen(SparseMask.from_rules(call, grid, keep=dense[:, None, :, None].expand(-1, -1, -1, columns)))
