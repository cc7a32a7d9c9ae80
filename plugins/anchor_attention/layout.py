"""Sizes, known on the host: the method's regions, and how pooled queries, flags and lists lie in memory."""

from __future__ import annotations

import math

from attrs import Factory, field, frozen

from sparseprefill.kernels.settings import power_of_two
from sparseprefill.mask.geometry import Geometry

WORD = 16  # keys per word of flags: a bit "sure" and a bit "unsure" each
STEP_PART = 16  # blocks of a group that are scored side by side


@frozen
class Regions:
    """Sizes in tokens; everything lies on the row's own token grid, so a chunk cut at a group changes nothing.

    group: of query blocks. tile_k: the largest key tile that fits both the blocks and the initial tokens.
    """

    block: int
    step: int
    init_tokens: int
    group: int = field(init=False, default=Factory(lambda self: self.block * self.step, takes_self=True))
    tile_k: int = field(
        init=False, default=Factory(lambda self: math.gcd(self.block, self.init_tokens), takes_self=True)
    )


@frozen(kw_only=True)
class Layout:
    """Layout of one call's pooled queries in memory, and the words of flags per key range.

    A *set* is the blocks of one group and head that one step scores; `heads` heads share a KV head's keys; `parts` is
    how many such shares a GQA group needs, `chunks` how many steps a group of many blocks needs. A *tile* is `rows`
    groups. Pooled queries are ``[shares, chunks, tiles, block_n, D]``, columns as `pool_kernel` orders them.
    """

    heads: int
    parts: int
    step: int
    chunks: int
    sets: int
    rows: int
    groups: int
    tiles: int
    shares: int
    first_key: int
    key_tiles: int
    words: int
    room: int

    @classmethod
    def of(cls, geometry: Geometry, kv_heads: int, regions: Regions, block_m: int, block_n: int) -> Layout:
        """From sizes alone."""
        group = geometry.heads // kv_heads
        step = min(max(power_of_two(regions.step), 2), STEP_PART)
        sets = block_n // step
        heads = min(power_of_two(group), sets)
        parts, chunks = -(-group // heads), -(-regions.step // step)
        rows = sets // heads
        groups = geometry.tile_rows(regions.group)
        first_key = regions.init_tokens // WORD * WORD
        # No row of the batch has a candidate at or after the last group's start; rows that start later have fewer.
        end = (geometry.q_offset + geometry.q_len - 1) // regions.group * regions.group
        key_tiles = -(-max(end - first_key, 0) // block_m)
        return cls(
            heads=heads,
            parts=parts,
            step=step,
            chunks=chunks,
            sets=sets,
            rows=rows,
            groups=groups,
            tiles=-(-groups // rows),
            shares=geometry.batch * kv_heads * parts,
            first_key=first_key,
            key_tiles=key_tiles,
            words=key_tiles * block_m // WORD,
            room=before(geometry.q_offset // regions.group, groups, regions),
        )


def before(first: int, row: int, regions: Regions) -> int:
    """Candidate keys of the rows in front of `row`, where row 0 is group `first`: where its list begins.

    A row of group g has ``max(0, g * group - init_tokens)``. The kernel computes the same (`compact_kernel`).
    """
    skip = min(max(regions.init_tokens // regions.group + 1 - first, 0), row)
    pairs = (row * (row - 1) - skip * (skip - 1)) // 2
    return (row - skip) * (first * regions.group - regions.init_tokens) + regions.group * pairs
