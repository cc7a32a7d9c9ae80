"""The estimator of AnchorAttention: anchor pass with carry, then identification. The executor is the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import field, frozen

from sparseprefill import kernels
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Carry, Plan

from . import identify
from .layout import workspace
from .regions import Regions
from .worth import AnchorPriority

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.stages import HeadScope, SparseExecutor

    from . import AnchorConfig


@frozen
class AnchorEstimator:
    """Algorithms 1 and 2. Its plan resumes from the anchor pass (Algorithm 3), so no pair is computed twice."""

    theta: float
    regions: Regions
    use_anchor: bool = True
    executor: SparseExecutor = field(factory=AutoExecutor)
    head_scope: ClassVar[HeadScope] = "head"

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
        """Anchor pass, then the stripes of each group; their weight against the anchor pass is left as priority."""
        geometry, regions = call.geometry, self.regions
        region = regions.anchor(geometry)
        state = self.executor.accumulate(call, Plan(region))
        mask = SparseMask(
            geometry,
            regions.block,
            regions.tile_k,
            group=regions.step,
            stripes=self._stripes(call, state.m),
            disjoint=True,
        )
        return Plan(mask, Carry(state, region), priority=AnchorPriority(regions, state.m, state.l))

    def workspace(self, call: AttentionCall) -> int:
        """Bytes that `estimate` asks for on a CUDA device, what its plan keeps included: an upper bound."""
        return workspace(call, self.regions)

    def _stripes(self, call: AttentionCall, m: torch.Tensor) -> IndexLists:
        if kernels.serve(call.q) and call.q.dtype != torch.float64:
            from . import launch

            return IndexLists(*launch.stripes(call, self.regions, m, self.theta, use_anchor=self.use_anchor))
        return identify.stripes(call, self.regions, m, self.theta, use_anchor=self.use_anchor)


def pipeline(config: AnchorConfig) -> Pipeline:
    """Build `anchor-attention`."""
    regions = Regions(config.block, config.step, config.init_tokens)
    return Pipeline(AnchorEstimator(config.theta, regions, config.use_anchor), name="anchor-attention")
