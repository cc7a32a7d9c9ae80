"""Sizes of Star Attention in whole tiles: per batch row on the device, and bounds that the host knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.mask.geometry import Geometry

LONG, BLOCK = 131072, 32768  # section 3.4: a quarter of the context up to 128K tokens, then 32K


@frozen(eq=False)
class Sizes:
    """What holds for one call. block, anchor, context: int64 ``[B]``, in tiles. most_*: the most of any row, in tiles.

    most_blocks: the most blocks of any row. uniform: whether all rows have blocks of `most_block` tiles.
    phases: whether query rows of phase 2 may occur.
    """

    block: Tensor
    anchor: Tensor
    context: Tensor
    most_block: int
    most_anchor: int
    most_blocks: int
    uniform: bool
    phases: bool


@frozen
class Rule:
    """The parameters; see `StarConfig`."""

    block_size: int | None
    anchor_length: int | None
    context_length: int | None
    tile: int

    @property
    def static(self) -> bool:
        """Whether the sizes are the same for every call: nothing is counted from the end of its keys."""
        if self.context_length is None:
            return self.block_size is not None
        return self.context_length >= 0

    @property
    def block(self) -> int | None:
        """Tokens per block, rounded up to tiles, where `static`."""
        if self.block_size is not None:
            return self._up(self.block_size) * self.tile
        return self._up(_quarter(self.context_length or 0)) * self.tile if self.static else None

    def most(self, geometry: Geometry) -> int:
        """Most tiles in the lists of a context row: those of anchor and block."""
        block = BLOCK if self.block_size is None else self.block_size
        anchor = block if self.anchor_length is None else self.anchor_length
        return min(self._up(block) + self._up(anchor), geometry.tile_columns(self.tile))

    def sizes(self, geometry: Geometry) -> Sizes:
        """The sizes for a call, without host synchronisation. Nothing is longer than the call's keys."""
        columns = geometry.tile_columns(self.tile)
        counts = geometry.key_counts()
        context, most = self._context(counts, geometry.kv_len)
        if self.block_size is not None:
            most_block = min(self._up(self.block_size), columns)
            block = torch.full_like(counts, most_block)
            most_blocks = -(-columns // most_block)
        else:
            quarter = torch.div(context + 3, 4, rounding_mode="floor").clamp(min=1)
            block = self._ceil(torch.where(context > LONG, BLOCK, quarter)).clamp(max=columns)
            most_block = min(self._up(_quarter(most, bound=True)), columns)
            most_blocks = max(4, -(-most // BLOCK))
        anchor, most_anchor = block, most_block
        if self.anchor_length is not None:
            most_anchor = min(self._up(self.anchor_length), columns)
            anchor = torch.full_like(counts, most_anchor)
        whole = torch.full_like(counts, columns)
        if self.context_length is not None:
            whole = torch.div(context, self.tile, rounding_mode="floor").clamp(max=columns)
        uniform = self.static or self.block_size is not None or (geometry.starts is None and geometry.lengths is None)
        phases = self.context_length is not None
        return Sizes(block, anchor, whole, most_block, most_anchor, most_blocks, uniform, phases)

    def _context(self, counts: Tensor, kv_len: int) -> tuple[Tensor, int]:
        """Tokens of context: int64 [B], and the most of any row."""
        if self.context_length is None:
            return counts, kv_len
        if self.context_length < 0:
            return (counts + self.context_length).clamp(min=0), max(kv_len + self.context_length, 0)
        return torch.full_like(counts, self.context_length), self.context_length

    def _up(self, tokens: int) -> int:
        return -(-tokens // self.tile)

    def _ceil(self, tokens: Tensor) -> Tensor:
        return torch.div(tokens + self.tile - 1, self.tile, rounding_mode="floor")


def _quarter(context: int, *, bound: bool = False) -> int:
    """Tokens per block of a context, or, as a bound, of any context that is no longer."""
    if context > LONG and not bound:
        return BLOCK
    return min(max(-(-context // 4), 1), BLOCK)
