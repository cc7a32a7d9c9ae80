"""The estimator of Star Attention on one device, and what it leaves as priority. The executor is the shared one."""

from __future__ import annotations

from functools import partial

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.config import inner_method
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import Priority, PriorityScores, nearness
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace, ranges_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Carry, Plan
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.stages import HeadScope
from sparseprefill.statistics.slashes import sinks_and_near

from . import StarConfig
from .blocks import Blocks
from .sizes import Sizes, most_tiles, static, static_block


@frozen
class StarEstimator:
    """Section 2: context rows attend to the anchor and to their block, all others to everything.

    inner: a pipeline whose estimator and refiners choose, in place of all, among the keys of (anchor, block); it sees
    each as a call of its own, so that hosts which hold one block each would choose the same.
    """

    config: StarConfig
    inner: Pipeline | None = None

    @property
    def grain(self) -> int | None:
        """One token where the sizes do not depend on the call; with an inner method one block."""
        if not static(self.config):
            return None
        return 1 if self.inner is None else static_block(self.config)

    @property
    def head_scope(self) -> HeadScope | None:
        """The inner method's; without one, each head for itself."""
        return "head" if self.inner is None else self.inner.head_scope

    @property
    def repeats(self) -> bool | str:
        """Sizes that are shares of the context ask for the prompt's length; an inner method is asked by itself."""
        if self.inner is None:
            return static(self.config) or "prompt"
        return False

    @property
    def tail(self) -> int:
        """The rows of phase 2, where they are counted from the end."""
        return max(0, -(self.config.context_length or 0))

    def workspace(self, call: AttentionCall) -> int:
        """Lists of one head, for all; with an inner method its bounds, the blocks' tensors, and what is moved back."""
        if self.inner is None:
            return ranges_workspace(call, self.config.tile, most_tiles(self.config, call.geometry))
        keys = call.q.shape[0] * call.kv_heads * call.kv_len * (call.q.shape[-1] + call.value_dim)
        tensors = (call.q.numel() + 2 * keys) * call.q.element_size()
        states = call.q.numel() // call.q.shape[-1] * call.value_dim * 4
        return 2 * tensors + states + self.inner.plan_bound(call) + default_workspace(call)

    def check_model(self, model: ModelIdentity) -> None:
        """The inner method's, where it was made for another model."""
        if self.inner is not None:
            self.inner.check_model(model)

    def unsupported(self, call: AttentionCall) -> str | None:
        """The inner method's objections, and sliding windows: inside (anchor, block) distances are others."""
        if self.inner is None:
            return None
        if call.window is not None:
            return f"a sliding window ({call.window} keys) is not supported with an inner method"
        reasons = self.inner.unsupported(call)
        return f"inner {self.inner.name}: {'; '.join(reasons)}" if reasons else None

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The mask of both phases; the inner method's carry, where it has one, for the rows of phase 1."""
        sizes, tile = Sizes.of(self.config, call.geometry), self.config.tile
        near = PriorityScores(tiles=partial(_nearness, self.config), tile_q=tile, tile_k=tile)
        if self.inner is None:
            return Plan(star_mask(call.geometry, sizes), priority=near)
        blocks = Blocks.of(call, sizes)
        plan = self.inner.plan(blocks.call, Memory())
        mask = blocks.mask(plan.mask, dense=sizes.phases)
        priority = near if plan.priority is None else InnerPriority(self.config, plan.priority, near)
        if plan.carry is None:
            return Plan(mask, priority=priority)
        carry = Carry(blocks.state(plan.carry.state), blocks.mask(plan.carry.region, dense=False))
        return Plan(mask, carry, priority=priority)


def star_mask(geometry: Geometry, sizes: Sizes) -> SparseMask:
    """Section 2: a context row sees the anchor and its own block (phase 1), any other row every key (phase 2)."""
    tile, row = sizes.tile, geometry.tiles(sizes.tile)
    block = sizes.block[:, None]
    start = row.clamp(min=0) // block * block
    anchor = torch.minimum(sizes.anchor[:, None], start)
    lists = sinks_and_near(geometry, tile, tile, anchor, start, sizes.most_anchor + sizes.most_block)
    if sizes.phases:
        lists = lists.filled(row >= sizes.context[:, None], geometry, tile, tile)
    return SparseMask(geometry, tile, tile, lists)


def _nearness(config: StarConfig, call: AttentionCall) -> Tensor:
    """The anchor stands for sinks and counts from its first tile, the block from the query's own tile."""
    return nearness(call, Sizes.of(config, call.geometry).anchor, config.tile)


@frozen(eq=False)
class InnerPriority(Priority):
    """The inner method's priority, in the call of the blocks, for rows of phase 1 and the keys of anchor and block.

    near: what speaks for all others. The blocks are made again where somebody asks.
    """

    config: StarConfig
    inner: Priority
    near: Priority

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        blocks = self._blocks(call)
        inner = self.inner.tile_scores(blocks.call, tile_q, tile_k)
        mine, source, inside = blocks.find(call.geometry.tiles(tile_q) * tile_q)
        row = inside // tile_q - blocks.call.geometry.first_tile(tile_q)[source]
        moved = inner[source, :, row.clamp(0, inner.shape[2] - 1)].transpose(1, 2)
        return _moved(moved, self.near.tile_scores(call, tile_q, tile_k), blocks, mine, source, tile_k)

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        blocks = self._blocks(call)
        mine, source, inside = blocks.find(position)
        # Each row of the blocks' call is asked for all places that any group has in it, one group at a time.
        asked = torch.zeros(blocks.call.q.shape[0], dtype=torch.int64, device=position.device)
        found = []
        for i in range(position.shape[1]):
            here = asked.scatter(0, source[:, i], inside[:, i])[:, None]
            found.append(self.inner.column_scores(blocks.call, here, heads)[source[:, i]])
        return _moved(torch.cat(found, 2), self.near.column_scores(call, position, heads), blocks, mine, source, 1)

    def _blocks(self, call: AttentionCall) -> Blocks:
        return Blocks.of(call, Sizes.of(self.config, call.geometry))


def _moved(scores: Tensor, near: Tensor, blocks: Blocks, mine: Tensor, source: Tensor, tile_k: int) -> Tensor:
    """``[B, h, n, X]``: scores ``[B, h, n, Y]`` by key tiles of the blocks' call, by those of the whole."""
    column = torch.arange(near.shape[-1], device=near.device) * tile_k
    prefix, start = (x.flatten()[source][..., None] for x in (blocks.prefix, blocks.start))
    behind = start + blocks.block[:, None, None]
    known = mine[..., None] & ((column < prefix) | ((column >= start) & (column < behind)))
    at = torch.where(column < prefix, column, column - start + prefix)
    at = (at // tile_k).clamp(0, scores.shape[-1] - 1)
    picked = torch.gather(scores, 3, at[:, None].expand(-1, scores.shape[1], -1, -1))
    return torch.where(known[:, None], picked, near.to(picked.dtype))


def pipeline(config: StarConfig) -> Pipeline:
    """Build `star-attention`."""
    inner = None if config.inner is None else inner_method(config.inner, "blocks have no memory of their own")
    return Pipeline(StarEstimator(evolve(config, inner=None), inner), name="star-attention")
