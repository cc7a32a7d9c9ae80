"""Upper bounds of the memory that a stage holds for a call, from sizes alone."""

from __future__ import annotations

from sparseprefill.call import AttentionCall

TILE, PER_PAIR, PER_KEY = 128, 16, 48
"""Units of `default_workspace`: tokens per tile; bytes per pair of tiles (maps and their lists), and per key."""


def default_workspace(call: AttentionCall, tile: int = TILE, per_pair: int = PER_PAIR) -> int:
    """The bound of a stage that states none: maps and lists of square tiles of each head, and vectors over the keys.

    tile: tokens of a tile. per_pair: bytes that the maps and lists take for each pair of tiles.
    """
    geometry = call.geometry
    pairs = geometry.tile_rows(tile) * geometry.tile_columns(tile)
    return geometry.batch * geometry.heads * (pairs * per_pair + geometry.kv_len * PER_KEY)


def ranges_workspace(call: AttentionCall, tile: int, width: int) -> int:
    """The bound of a mask of `IndexLists.from_ranges`: lists of at most `width` tiles, shared by all heads."""
    geometry = call.geometry
    return geometry.batch * geometry.tile_rows(tile) * (64 * width + 32 * geometry.heads)
