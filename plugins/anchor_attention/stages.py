"""The estimator of AnchorAttention: anchor pass with carry, then identification. The executor is the shared one."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, rows_at, uncast
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.geometry import Geometry, kept_by_sizes
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import Priority, tiles_of_columns
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Carry, Plan
from sparseprefill.stages import HeadScope, SparseExecutor
from sparseprefill.statistics.pooled import real_rows, tile_mean
from sparseprefill.statistics.slashes import sinks_and_near

from . import AnchorConfig
from .layout import Layout, Regions


@frozen
class AnchorEstimator:
    """Algorithms 1 and 2. Its plan resumes from the anchor pass (Algorithm 3), so no pair is computed twice."""

    theta: float
    regions: Regions
    use_anchor: bool = True
    executor: SparseExecutor = field(factory=AutoExecutor)
    head_scope: ClassVar[HeadScope] = "head"

    @property
    def repeats(self) -> bool:
        """As the executor does, which computes the anchor pass."""
        return getattr(self.executor, "repeats", False) is True

    @property
    def grain(self) -> int:
        """Cutting a prompt at whole groups changes nothing."""
        return self.regions.group

    def unsupported(self, call: AttentionCall) -> str | None:
        """Stripes lie outside any sliding window."""
        if call.window is not None:
            return f"a sliding window ({call.window} keys) leaves no room for stripes"
        return None

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Anchor pass, then the stripes of each group; their weight against the anchor pass is left as priority."""
        geometry, regions = call.geometry, self.regions
        # Alg. 1's keys: [0, init) and [group start, row]; each key once where the two overlap.
        region = SparseMask(geometry, regions.block, regions.tile_k, region_lists(geometry, regions))
        state = self.executor.accumulate(call, Plan(region))
        if kernels.serve(call.q) and call.q.dtype != torch.float64:
            from . import kernels as gpu

            found = gpu.stripes(call, regions, state.m, self.theta, use_anchor=self.use_anchor)
            lists = IndexLists(*found, sound=True)
        else:
            lists = stripes(call, regions, state.m, self.theta, use_anchor=self.use_anchor)
        mask = SparseMask(geometry, region.tile_q, region.tile_k, group=regions.step, stripes=lists, disjoint=True)
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


@kept_by_sizes()
def region_lists(geometry: Geometry, regions: Regions) -> IndexLists:
    """Key tiles of the anchor region for each query tile: the initial tokens, and those from its group's start on."""
    size, init, group = regions.tile_k, regions.init_tokens // regions.tile_k, regions.group // regions.tile_k
    start = (geometry.tiles(regions.block) // regions.step).clamp(min=0) * group
    return sinks_and_near(geometry, regions.block, size, init, start, init + group)


def stripes(call: AttentionCall, regions: Regions, m: Tensor, theta: float, *, use_anchor: bool = True) -> IndexLists:
    """Lists ``[B, Hq, G]`` of the keys in [init, group start) that any block of the group selects (eq. 2).

    m: row maxima of the anchor pass ``[B, Hq, Nq]``; their mean over a block is its anchor, unless `use_anchor` is
    False (0 then). A key is kept unless ``anchor - logit > theta``, so that a NaN logit travels as it would in dense
    attention.
    """
    geometry, tokens = call.geometry, regions.group
    groups = geometry.tile_rows(tokens)
    if (geometry.q_offset + geometry.q_len - 1) // tokens * tokens <= regions.init_tokens:
        # No group begins behind the initial tokens.
        return IndexLists.empty(geometry.batch, geometry.heads, groups, geometry.device)
    pooled, anchor = tile_mean(call.q, geometry, regions.block), tile_mean(m, geometry, regions.block)
    if not use_anchor:
        anchor = torch.zeros_like(anchor)
    if call.starts is not None or call.lengths is not None:
        # A block of padding alone asks for no column: else its group would depend on the rest of the batch.
        padding = real_rows(geometry, regions.block) == 0
        anchor = anchor.masked_fill(padding[:, None], torch.inf)
    block, first = geometry.tiles(regions.block), geometry.first_tile(tokens)
    which = block // regions.step - first[:, None]
    keep = torch.zeros(
        geometry.batch, geometry.heads, groups, geometry.kv_len, dtype=torch.bool, device=geometry.device
    )
    for b in range(geometry.batch):
        start = 0 if geometry.starts is None else int(geometry.starts[b])
        turned = call.k[b].to(pooled.dtype).transpose(-1, -2).contiguous()  # few queries are multiplied faster so
        for g in range(groups):
            end = (int(first[b]) + g) * tokens
            if not regions.init_tokens < end < geometry.q_offset - start + geometry.q_len:
                continue
            rows = torch.nonzero(which[b] == g)[:, 0]
            keys = turned[..., start + regions.init_tokens : start + end]
            if rows.numel() == 0 or keys.shape[2] == 0:
                continue
            q = pooled[b, :, rows].unflatten(0, (-1, call.group)).flatten(1, 2)
            logits = (q @ keys).mul_(call.softmax_scale).view(geometry.heads, rows.numel(), -1)
            if call.softcap is not None:
                logits = call.softcap * torch.tanh(logits / call.softcap)
            below = (anchor[b, :, rows, None] - logits).amin(1)  # of the block that comes nearest; NaN where one is
            keep[b, :, g, regions.init_tokens : regions.init_tokens + keys.shape[2]] = ~(below > theta)
    return IndexLists.from_map(keep)


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

    @uncast
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
        first = position // regions.group * regions.step
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
