"""The anchor region of each query block: the initial tokens, and the local window from its group's start."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from attrs import frozen

from sparseprefill.mask.geometry import Geometry
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
        size = self.tile_k
        lists = _remembered(self, geometry) if _may_remember(geometry) else self.lists(geometry)
        return SparseMask(geometry, self.block, size, lists)

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


def _may_remember(geometry: Geometry) -> bool:
    """Whether the lists follow from sizes alone; a CUDA graph's capture must not share memory with eager calls."""
    if geometry.starts is not None:
        return False
    return geometry.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _remembered(regions: Regions, geometry: Geometry) -> IndexLists:
    """The lists of the last few geometries, which the layers of a model share. Never written to."""
    cuda = geometry.device.type == "cuda"
    stream = torch.cuda.current_stream(geometry.device).cuda_stream if cuda else 0
    sizes = (geometry.batch, geometry.heads, geometry.q_len, geometry.kv_len, geometry.q_offset)
    return _built(regions, *sizes, geometry.device, stream)


@lru_cache(maxsize=16)
def _built(
    regions: Regions, batch: int, heads: int, q_len: int, kv_len: int, q_offset: int, device: torch.device, stream: int
) -> IndexLists:
    """`stream` keeps calls of different CUDA streams apart, which would read before the lists are written."""
    return regions.lists(Geometry(batch, heads, q_len, kv_len, q_offset, device))
