"""The estimator of AnchorAttention: anchor pass with carry, then identification. The executor is the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import rows_at
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import Priority, tiles_of_columns
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Carry, Plan
from sparseprefill.statistics.pooled import real_rows, tile_mean

from . import identify
from .layout import Layout
from .regions import Regions

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
        """Bytes on the device that the anchor pass and the identification need, their results included: an upper bound.

        Most of it is 4 bytes for every candidate key of every group and head, the room of the lists; and the state of
        the anchor pass, 4 bytes for each element of the output.
        """
        geometry, regions, width = call.geometry, self.regions, call.q.shape[-1]
        plan = Layout.of(geometry, call.kv_heads, regions, 256, 64)
        lists = geometry.batch * geometry.heads * plan.groups
        blocks = geometry.batch * geometry.tile_rows(regions.block)
        places = plan.shares * plan.chunks * plan.tiles
        state = geometry.batch * geometry.heads * geometry.q_len * (call.value_dim + 2) * 4
        ranges = blocks * 32 * ((regions.init_tokens + regions.group) // regions.tile_k)
        found = geometry.batch * geometry.heads * plan.room * 4 + lists * (12 + plan.words * 4)
        means = blocks * geometry.heads * (width + 4) * 4 + places * (64 * (width * 2 + 4) + plan.sets * 12)
        small = 1 << 20  # counters and flags of the launches; the allocator rounds each tensor up to 512 bytes
        return state + ranges + found + means + small

    def _stripes(self, call: AttentionCall, m: Tensor) -> IndexLists:
        if kernels.serve(call.q) and call.q.dtype != torch.float64:
            from . import launch

            return IndexLists(*launch.stripes(call, self.regions, m, self.theta, use_anchor=self.use_anchor))
        return identify.stripes(call, self.regions, m, self.theta, use_anchor=self.use_anchor)


@frozen(eq=False)
class AnchorPriority(Priority):
    """``exp(logit - lse)``: pooled logits as of Algorithm 2, for the mean query of a block, against the block's anchor
    pass; the mean over the blocks of a group.

    m, l: of the anchor pass's state, ``[B, Hq, Nq]``. Logits are made again where somebody asks for them.
    """

    regions: Regions
    m: Tensor
    l: Tensor  # noqa: E741  (as of SoftmaxState)

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """See `Priority`: the mean of a tile's columns."""
        return tiles_of_columns(self, call, self.regions.group, tile_q, tile_k)

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        geometry, regions = call.geometry, self.regions
        key = torch.arange(geometry.kv_len, device=geometry.device)
        k = call.k[:, torch.arange(geometry.heads, device=geometry.device)[heads] // call.group]
        if geometry.starts is not None:
            k = rows_at(k, (key + geometry.starts[:, None]).clamp(max=geometry.kv_len - 1))
        real = real_rows(geometry, regions.block) > 0
        pooled = tile_mean(call.q[:, heads], geometry, regions.block)
        lse = tile_mean((self.m + torch.log(self.l))[:, heads], geometry, regions.block)
        first = torch.div(position, regions.group, rounding_mode="floor") * regions.step
        first = first - geometry.first_tile(regions.block)[:, None]
        k = k.to(pooled.dtype).mT
        total = pooled.new_zeros(geometry.batch, pooled.shape[1], position.shape[1], geometry.kv_len)
        count = total.new_zeros(geometry.batch, 1, position.shape[1], 1)
        for i in range(regions.step):
            row = first + i
            there = (row >= 0) & (row < real.shape[1])
            row = row.clamp(0, real.shape[1] - 1)
            there = (there & torch.gather(real, 1, row))[:, None, :, None]
            logits = rows_at(pooled, row) @ k * call.softmax_scale
            if call.softcap is not None:
                logits = call.softcap * torch.tanh(logits / call.softcap)
            shares = torch.exp(logits - rows_at(lse[..., None], row))
            total += torch.where(there, shares, 0.0)
            count += there
        scores = total / count.clamp(min=1)
        if geometry.starts is None and geometry.lengths is None:
            return scores
        padding = key >= geometry.key_counts()[:, None]  # which is worth nothing
        return scores.masked_fill(padding[:, None, None], 0.0)


def pipeline(config: AnchorConfig) -> Pipeline:
    """Build `anchor-attention`."""
    regions = Regions(config.block, config.step, config.init_tokens)
    return Pipeline(AnchorEstimator(config.theta, regions, config.use_anchor), name="anchor-attention")
