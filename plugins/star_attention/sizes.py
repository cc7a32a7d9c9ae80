"""Sizes of Star Attention in whole tiles: per batch row on the device, and bounds that the host knows."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask.geometry import Geometry

from . import StarConfig

LONG, BLOCK = 131072, 32768  # section 3.4: a quarter of the context up to 128K tokens, then 32K


def static(config: StarConfig) -> bool:
    """True if the sizes are the same for every call: nothing is counted from the end of its keys."""
    return config.block_size is not None if config.context_length is None else config.context_length >= 0


def static_block(config: StarConfig) -> int | None:
    """Tokens per block, rounded up to tiles, where they are the same for every call."""
    if config.block_size is None and not static(config):
        return None
    return _up(config.block_size or _quarter(config.context_length or 0), config.tile) * config.tile


def most_tiles(config: StarConfig, geometry: Geometry) -> int:
    """Most tiles in the lists of a context row: those of anchor and block."""
    block = config.block_size or BLOCK
    anchor = block if config.anchor_length is None else config.anchor_length
    return min(_up(block, config.tile) + _up(anchor, config.tile), geometry.tile_columns(config.tile))


@frozen(eq=False)
class Sizes:
    """Sizes of one call. block, anchor, context: int64 ``[B]``, in tiles. most_*: the most of any row, in tiles.

    most_blocks: the most blocks of any row. uniform: whether all rows have blocks of `most_block` tiles.
    phases: whether query rows of phase 2 may occur. tile: tokens of a tile.
    """

    block: Tensor
    anchor: Tensor
    context: Tensor
    most_block: int
    most_anchor: int
    most_blocks: int
    uniform: bool
    phases: bool
    tile: int

    @classmethod
    def of(cls, config: StarConfig, geometry: Geometry) -> Sizes:
        """The sizes for a call, without host synchronisation. Nothing is longer than the call's keys."""
        tile, columns, counts = config.tile, geometry.tile_columns(config.tile), geometry.key_counts()
        context, most = _context(config, counts, geometry.kv_len)
        if config.block_size is not None:
            most_block = min(_up(config.block_size, tile), columns)
            block = torch.full_like(counts, most_block)
            most_blocks = -(-columns // most_block)
        else:
            quarter = ((context + 3) // 4).clamp(min=1)
            tokens = torch.where(context > LONG, BLOCK, quarter)
            block = ((tokens + tile - 1) // tile).clamp(max=columns)
            most_block = min(_up(_quarter(most, bound=True), tile), columns)
            most_blocks = max(4, -(-most // BLOCK))
        anchor, most_anchor = block, most_block
        if config.anchor_length is not None:
            most_anchor = min(_up(config.anchor_length, tile), columns)
            anchor = torch.full_like(counts, most_anchor)
        whole = torch.full_like(counts, columns)
        phases = config.context_length is not None
        if phases:
            whole = (context // tile).clamp(max=columns)
        plain = geometry.starts is None and geometry.lengths is None
        uniform = plain or config.block_size is not None or static(config)
        return cls(block, anchor, whole, most_block, most_anchor, most_blocks, uniform, phases, tile)


def _context(config: StarConfig, counts: Tensor, kv_len: int) -> tuple[Tensor, int]:
    """Tokens of context: int64 ``[B]``, and the most of any row."""
    length = config.context_length
    if length is None:
        return counts, kv_len
    if length < 0:
        return (counts + length).clamp(min=0), max(kv_len + length, 0)
    return torch.full_like(counts, length), length


def _up(tokens: int, tile: int) -> int:
    return -(-tokens // tile)


def _quarter(context: int, *, bound: bool = False) -> int:
    """Tokens per block of a context, or, as a bound, of any context that is no longer."""
    if context > LONG and not bound:
        return BLOCK
    return min(max(-(-context // 4), 1), BLOCK)
