"""The estimator of SampleAttention. The executor is the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import frozen

from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.statistics.sampled import sampled_mass
from sparseprefill.statistics.select import top_mass
from sparseprefill.statistics.slashes import SampledPriority, slash_tiles

from .cra import SAMPLED, Sampled
from .samples import Samples

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.stages import HeadScope

    from . import SampleConfig


@frozen
class SampleEstimator:
    """Algorithm 1: sample each chunk's last rows, keep columns and diagonals up to both thresholds, merge them.

    It looks at the last rows of chunks of the call, so cutting a prompt changes the estimate: it has no grain.
    """

    alpha_c: float
    alpha_s: float
    chunk_n: int
    block: int
    extend: str
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and their lists."""
        return default_workspace(call, self.block)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles of columns and diagonals; `Plan.notes` keeps what `cra` needs, the mass is left as priority."""
        samples = Samples.of(call.geometry, self.block, self.chunk_n)
        mass = sampled_mass(call, samples.rows, samples.real, self.block, column=self.block, until=samples.until)
        columns, slashes = top_mass(mass.columns, self.alpha_c), top_mass(mass.slashes, self.alpha_s)
        part = samples.part
        speaks: Tensor | None = part
        if self.extend == "union":
            columns, slashes, part = columns.any(2, keepdim=True), slashes.any(2, keepdim=True), torch.zeros_like(part)
            speaks = None
        keep = slash_tiles(call.geometry, slashes, self.block, part, columns)
        notes = Sampled(samples.rows.flatten(1), samples.real.flatten(1), mass.lse.flatten(2))
        # The first tile of every row is kept as well as the diagonal one.
        tiles = TileMap(geometry=call.geometry, tile_q=self.block, tile_k=self.block, keep=keep, band=0, sink=1)
        priority = SampledPriority(mass, samples.real, self.block, column=self.block, part=speaks, by_column=True)
        mask = SparseMask(call.geometry, self.block, self.block, tiles)
        return Plan(mask, priority=priority, notes={SAMPLED: notes})


def pipeline(config: SampleConfig) -> Pipeline:
    """Build `sample-attention`."""
    estimator = SampleEstimator(config.alpha_c, config.alpha_s, config.chunk_n, config.block, config.extend)
    return Pipeline(estimator, name="sample-attention")
