"""The estimator of BFLA: blocks by softmax mass. The rescues are the core's refiners.

A block's score is the largest dot product over pairs of flattened token groups (eq. 3 and 4): of a group, g vectors of
C entries make one of g * C, on each batch row's own token grid.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.geometry import reachable_map, regrid
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.refiners.rescue import GqaUnion, LocalBand, RandomRescue, Sink, StrideRescue
from sparseprefill.stages import HeadScope
from sparseprefill.statistics.grid import keys_on_grid, queries_on_grid, supported, wide_products
from sparseprefill.statistics.select import top_mass

from . import BflaConfig

CHUNK = 1 << 23
"""Scores of groups at a time: enough to fill a GPU, and few enough that most of what is not causal is left out."""


@frozen
class BflaEstimator:
    """Section 3.2: block scores, softmax over causal blocks, keep mass, expansion to tiles."""

    block: int
    group: int
    keep_mass: float
    mean: bool
    tile: int
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True

    @property
    def grain(self) -> int:
        """A block row looks at its own queries and the keys up to them."""
        return self.block

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and their lists."""
        return default_workspace(call, self.tile)

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles of the blocks that reach the mass; the blocks' shares are left as priority."""
        alpha, softcap = (call.softmax_scale / self.group, call.softcap) if self.mean else (call.softmax_scale, None)
        keep, mass = kept_tiles(call, self.block, self.group, alpha, softcap, self.keep_mass, self.tile)
        priority = PriorityScores(tiles=mass, tile_q=self.block, tile_k=self.block)
        return Plan(SparseMask.from_tiles(call, keep, self.tile), priority=priority)


def kept_tiles(
    call: AttentionCall, block: int, size: int, alpha: float, softcap: float | None, keep_mass: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Tiles of the kept blocks, bool ``[B, Hq, R, C]``, and the softmax mass of each block.

    size: tokens per group. alpha: factor on the scores, before the softcap. On a GPU a few kernels do it.
    """
    if kernels.serve(call.q) and supported(call, block, size):
        from . import kernels as gpu

        return gpu.kept_tiles(call, block, size, alpha, softcap, keep_mass, tile)
    geometry = call.geometry
    scores = capped(block_scores(call, block, size).mul_(alpha), softcap)
    keep, mass = keep_blocks(scores, reachable_map(geometry, block, block)[:, None], keep_mass)
    keep = regrid(geometry, keep, block, tile).repeat_interleave(block // tile, dim=-1)
    return keep[..., : geometry.tile_columns(tile)], mass


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores under the softcap; -inf, where there is no pair, stays."""
    if softcap is None:
        return scores
    return torch.where(scores.isneginf(), scores, softcap * torch.tanh(scores / softcap))


def keep_blocks(scores: Tensor, causal: Tensor, keep_mass: float) -> tuple[Tensor, Tensor]:
    """Eq. 8 to 12: bool ``[B, Hq, R, L]``, kept blocks, and the softmax mass of each.

    Blocks of a NaN or infinite score are kept beside the mass, so that it reaches the output as in dense attention.
    """
    scores = torch.where(causal, scores, -torch.inf)
    nonfinite = ~(scores < torch.inf)
    mass = torch.softmax(scores.masked_fill(nonfinite, -torch.inf), -1)
    mass = torch.nan_to_num(mass, nan=0.0)  # rows of padding alone, which have no causal block
    return (top_mass(mass, keep_mass) | nonfinite) & causal, mass


def block_scores(call: AttentionCall, block: int, size: int, entries: int | None = None) -> Tensor:
    """``[B, Hq, R, L]`` of query blocks and key blocks, float32 (float64 for float64 calls); -inf without a pair.

    A pair of groups counts where both hold a token at some place. Works on chunks of query blocks, so that about
    `entries` scores of groups exist at a time, and leaves out the key blocks behind a chunk. K is not repeated for GQA.
    """
    entries = entries or (CHUNK if call.q.is_cuda else CHUNK >> 2)
    geometry, per = call.geometry, block // size
    _, low, high = geometry.token_range()
    behind = (geometry.q_offset + geometry.q_len - 1) // block + 1
    keys = keys_on_grid(call, behind * block).unflatten(2, (-1, size)).flatten(3)
    keys_end = _places(high, torch.zeros_like(high), size, behind * per)  # keys hold every place before
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    batch, heads, rows, columns = geometry.map_shape(block, block)
    scores = torch.full((batch, heads, rows, columns), -torch.inf, dtype=dtype, device=geometry.device)
    step = max(1, entries // (batch * heads * per * per * behind))
    for first in range(0, rows, step):
        blocks = range(first, min(first + step, rows))
        end = min(behind, geometry.q_offset // block + blocks.stop)
        queries = queries_on_grid(call, block, first, len(blocks)).unflatten(2, (-1, size)).flatten(3)
        start = (geometry.first_tile(block) + first) * block
        begin, stop = (_places(bound, start, size, queries.shape[2])[..., None] for bound in (low, high))
        pairs = wide_products(queries, keys[:, :, : end * per])
        meet = begin < torch.minimum(stop, keys_end[:, None, : end * per])
        pairs.masked_fill_(~meet[:, None], -torch.inf)
        scores[:, :, first : blocks.stop, :end] = pairs.unflatten(3, (end, per)).unflatten(2, (-1, per)).amax((3, 5))
    return scores


def _places(bound: Tensor, start: Tensor, size: int, count: int) -> Tensor:
    """int64 ``[B, count]``: places before a position in each of `count` groups from `start` on; int64 ``[B]`` each."""
    return (bound[:, None] - start[:, None] - torch.arange(count, device=bound.device) * size).clamp(0, size)


def pipeline(config: BflaConfig) -> Pipeline:
    """Build `bfla`."""
    refiners = (
        LocalBand(config.local_tiles) if config.local_tiles else None,
        Sink(config.sink_tiles) if config.sink_tiles else None,
        StrideRescue(config.stride, config.seed) if config.stride is not None else None,
        RandomRescue(config.random, config.seed) if config.random else None,
        GqaUnion() if config.gqa_union else None,
    )
    mean = config.score_norm == "mean"
    estimator = BflaEstimator(config.block, config.group, config.keep_mass, mean, config.tile)
    return Pipeline(estimator, refiners=tuple(one for one in refiners if one is not None), name="bfla")
