"""The estimator of Star Attention on one device. The executor is the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from sparseprefill.config import inner_method
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace, ranges_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Carry, Plan

from .blocks import Blocks
from .scatter import Places
from .sizes import Rule
from .tiles import star_mask
from .worth import StarPriority

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.profiles.identity import ModelIdentity
    from sparseprefill.route import Route
    from sparseprefill.stages import HeadScope

    from . import StarConfig


@frozen
class StarEstimator:
    """Section 2: context rows attend to the anchor and to their block, all others to everything.

    inner: a pipeline whose estimator and refiners choose, in place of all, among the keys of (anchor, block); it sees
    each as a call of its own, so that hosts which hold one block each would choose the same.
    """

    rule: Rule
    inner: Pipeline | Route | None = None

    @property
    def grain(self) -> int | None:
        """One token where the sizes do not depend on the call; with an inner method one block."""
        if not self.rule.static:
            return None
        return 1 if self.inner is None else self.rule.block

    @property
    def head_scope(self) -> HeadScope | None:
        """The inner method's; without one, each head for itself."""
        return "head" if self.inner is None else self.inner.head_scope

    @property
    def tail(self) -> int:
        """The rows of phase 2, where they are counted from the end."""
        return max(0, -(self.rule.context_length or 0))

    def workspace(self, call: AttentionCall) -> int:
        """Lists of one head, for all; with an inner method its bounds, the blocks' tensors, and what is moved back."""
        if self.inner is None:
            return ranges_workspace(call, self.rule.tile, self.rule.most(call.geometry))
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

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """The mask of both phases; the inner method's carry, where it has one, for the rows of phase 1."""
        geometry, tile = call.geometry, self.rule.tile
        sizes = self.rule.sizes(geometry)
        if self.inner is None:
            return Plan(star_mask(geometry, sizes, tile), priority=StarPriority(self.rule))
        blocks = Blocks.of(call, sizes, tile)
        plan = self.inner.plan(blocks.call, Memory())
        places = Places.of(geometry, blocks, sizes, tile)
        mask = places.mask(plan.mask, dense=sizes.phases)
        priority = StarPriority(self.rule, plan.priority)
        if plan.carry is None:
            return Plan(mask, priority=priority)
        carry = Carry(places.state(plan.carry.state), places.mask(plan.carry.region, dense=False))
        return Plan(mask, carry, priority=priority)


def pipeline(config: StarConfig) -> Pipeline:
    """Build `star-attention`."""
    rule = Rule(config.block_size, config.anchor_length, config.context_length, config.tile)
    inner = None if config.inner is None else inner_method(config.inner, "blocks have no memory of their own")
    return Pipeline(StarEstimator(rule, inner), name="star-attention")
