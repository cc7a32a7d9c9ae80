"""The estimator of AnchorAttention: anchor pass with carry, then identification. The executor is the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Carry, Plan
from sparseprefill.pooling import tile_mean

from . import identify
from .regions import Regions

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.lists import IndexLists
    from sparseprefill.memory import Memory
    from sparseprefill.stages import SparseExecutor

    from .config import AnchorConfig


@frozen
class AnchorEstimator:
    """Algorithms 1 and 2. Its plan resumes from the anchor pass (Algorithm 3), so no pair is computed twice."""

    theta: float
    regions: Regions
    use_anchor: bool = True
    executor: SparseExecutor = field(factory=AutoExecutor)

    @property
    def grain(self) -> int:
        """Cutting a prompt at whole groups changes nothing."""
        return self.regions.group

    def unsupported(self, call: AttentionCall) -> str | None:
        """Stripes lie outside any sliding window."""
        if call.window is not None:
            return f"a sliding window ({call.window} keys) leaves no room for stripes"
        return None

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Anchor pass, pooled queries and anchors, then the stripes of each group."""
        geometry, regions = call.geometry, self.regions
        region = regions.anchor(geometry)
        state = self.executor.accumulate(call, Plan(region))
        pooled = tile_mean(call.q, geometry, regions.block)
        anchor = tile_mean(state.m, geometry, regions.block)
        if not self.use_anchor:
            anchor = torch.zeros_like(anchor)
        if geometry.starts is not None or geometry.lengths is not None:
            # A block of padding alone asks for no column: else its group would depend on the rest of the batch.
            real = tile_mean(geometry.real_queries()[:, None].float(), geometry, regions.block) > 0
            anchor = anchor.masked_fill(~real, torch.inf)
        mask = SparseMask(
            geometry,
            regions.block,
            regions.tile_k,
            group=regions.step,
            stripes=self._stripes(call, pooled, anchor),
            disjoint=True,
        )
        return Plan(mask, Carry(state, region))

    def _stripes(self, call: AttentionCall, pooled: torch.Tensor, anchor: torch.Tensor) -> IndexLists:
        if call.q.device.type == "cuda":
            from . import kernels

            return kernels.stripes(call, self.regions, pooled, anchor, self.theta)
        return identify.stripes(call, self.regions, pooled, anchor, self.theta)


def pipeline(config: AnchorConfig) -> Pipeline:
    """Build `anchor-attention`."""
    regions = Regions(config.block, config.step, config.init_tokens)
    return Pipeline(AnchorEstimator(config.theta, regions, config.use_anchor), name="anchor-attention")
