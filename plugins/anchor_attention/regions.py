"""The anchor region of each query block: the initial tokens, and the local window from its group's start."""

from __future__ import annotations

import math

import torch
from attrs import frozen

from sparseprefill.mask.geometry import Geometry, Sizes, kept
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask


@frozen
class Regions:
    """Sizes in tokens; everything lies on the row's own token grid, so a chunk cut at a group changes nothing."""

    block: int
    step: int
    init_tokens: int

    @property
    def group(self) -> int:
        """Tokens per group of query blocks."""
        return self.block * self.step

    @property
    def tile_k(self) -> int:
        """The largest key tile that fits both the blocks and the initial tokens."""
        return math.gcd(self.block, self.init_tokens)

    def anchor(self, geometry: Geometry) -> SparseMask:
        """Alg. 1's keys: [0, init) and [group start, row]; each key once where the two overlap."""
        sizes = geometry.sizes
        lists = self.lists(geometry) if sizes is None else _kept_lists(self, sizes)
        return SparseMask(geometry, self.block, self.tile_k, lists)

    def lists(self, geometry: Geometry) -> IndexLists:
        """The region's key tiles per query tile, made afresh."""
        size = self.tile_k
        block = geometry.tiles(self.block)
        behind = torch.where(block >= 0, (block + 1) * self.block // size, 0).clamp(max=geometry.tile_columns(size))
        init = behind.clamp(max=self.init_tokens // size)
        window = torch.div(block, self.step, rounding_mode="floor").clamp(min=0) * (self.group // size)
        first = torch.stack([torch.zeros_like(init), torch.maximum(window, init)], -1)
        last = torch.stack([init, behind], -1)
        width = min((self.init_tokens + self.group) // size, geometry.tile_columns(size))
        return IndexLists.from_ranges(first, last, geometry.heads, width)


@kept
def _kept_lists(regions: Regions, sizes: Sizes) -> IndexLists:
    return regions.lists(Geometry(*sizes))
