"""The estimator of BFLA: blocks by softmax mass. The rescues are the core's refiners."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.mask.geometry import reachable_map, regrid
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.refiners.heads import GqaUnion
from sparseprefill.refiners.rescue import LocalBand, RandomRescue, Sink, StrideRescue
from sparseprefill.statistics.select import top_mass

from .scores import block_scores

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.stages import HeadScope

    from . import BflaConfig


@frozen
class BflaEstimator:
    """Section 3.2: block scores, softmax over causal blocks, keep mass, expansion to tiles."""

    block: int
    group: int
    keep_mass: float
    mean: bool
    tile: int
    head_scope: ClassVar[HeadScope] = "head"

    @property
    def grain(self) -> int:
        """A block row looks at its own queries and the keys up to them."""
        return self.block

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and their lists."""
        return default_workspace(call, self.tile)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles of the blocks that reach the mass; the blocks' shares are left as priority."""
        softcap = call.softcap if self.mean else None
        keep, mass = kept_tiles(call, self.block, self.group, self._alpha(call), softcap, self.keep_mass, self.tile)
        priority = PriorityScores(tiles=mass, tile_q=self.block, tile_k=self.block)
        return Plan(SparseMask.from_tiles(call, keep, self.tile), priority=priority)

    def _alpha(self, call: AttentionCall) -> float:
        return call.softmax_scale / self.group if self.mean else call.softmax_scale


def kept_tiles(
    call: AttentionCall, block: int, size: int, alpha: float, softcap: float | None, keep_mass: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Tiles of the kept blocks, bool ``[B, Hq, R, C]``, and the softmax mass of each block.

    size: tokens per group. alpha: factor on the scores, before the softcap. On a GPU a few kernels do it (`launch`).
    """
    if kernels.serve(call.q):
        from sparseprefill.kernels.groups.launch import supported

        if supported(call, block, size):
            from . import launch

            return launch.kept_tiles(call, block, size, alpha, softcap, keep_mass, tile)
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
