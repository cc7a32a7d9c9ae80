"""Share, the estimator, which reads pivots, and the observer, which writes them."""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

import torch
from attrs import Factory, asdict, evolve, field, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, uncast
from sparseprefill.config import inner_method
from sparseprefill.errors import ParameterError, StageError
from sparseprefill.mask.geometry import by_block
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Result
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.stages import HeadScope, widest_scope
from sparseprefill.statistics.sampled import SampledMass, last_mass, seen_blocks
from sparseprefill.statistics.select import top_mass
from sparseprefill.statistics.slashes import SampledPriority, columns_and_diagonals, vertical_slash

from . import SINGLE, ShareConfig
from .heads import Clusters, LayerHeads, of_heads
from .mixed import mixed
from .pivots import Choice, Pivots, choose, earlier, on_blocks, pattern_tiles, renewed, shares

MISSING = (
    "no table of head clusters; make one with `sparseprefill cluster --model PATH` and pass clusters=TABLE, or "
    "clusters='single' to put all heads into one cluster"
)
PART = 256
"""Rows of a block map that are sorted at once; the kernel sorts nothing and takes all."""


@frozen(eq=False)
class Evidence:
    """The estimator's message to the observer. mask: as the estimator made it."""

    heads: LayerHeads
    choice: Choice
    mask: SparseMask


def _table(share: Share) -> Clusters:
    table = None if share.clusters in (None, SINGLE) else share.clusters
    return Clusters(table, sharing=share.tau > 0)


def _fallback(share: Share) -> Pipeline | None:
    if share.inner is None:
        return None
    made = inner_method(share.inner, "some of the heads it would see here ran another pattern")
    if isinstance(made.estimator, Share):
        raise ParameterError(
            "inner is a Share itself, and nothing would keep its pivots; pass the method that it shares"
        )
    return made


@frozen(kw_only=True, eq=False)
class Share(ShareConfig):
    """Shares masks over clusters of heads and over layers: ``Share(inner="xattention", clusters=TABLE, tau=0.2)``.

    SharePrefill, Algorithms 3 to 5, head by head: a pivot's pattern where a head looks like it; all tiles for the first
    head of a cluster without one, which makes it; else the mask of the method `inner`, pair for pair, which with None,
    the paper's own, is vertical-slash. It needs the observer that writes the pivots: `Share.pipeline`, or
    ``Pipeline(share, observers=(share.observer,))``. All parameters are those of `ShareConfig`.
    key: of its own, for its evidence and its pivots, so that several may serve one pipeline. table: of the heads of a
    layer. fallback: the inner method, None for vertical-slash.

    An inner plan may have tiles of any size, stripes, a carry, probes and notes; see `mixed`. The inner method's
    estimator and refiners run, with no memory. A Share looks at the call's last queries, and pivots serve the call that
    made them: it has no grain.

    Raises ParameterError for an inner method with observers, or one that shares masks itself.
    """

    key: str = field(init=False, repr=False, factory=lambda: f"share-prefill {uuid4().hex}")
    table: Clusters = field(init=False, repr=False, default=Factory(_table, takes_self=True))
    fallback: Pipeline | None = field(init=False, repr=False, default=Factory(_fallback, takes_self=True))

    @property
    def observer(self) -> PivotObserver:
        """The writer of the pivots that this stage reads."""
        return PivotObserver(self)

    @property
    def relies_on(self) -> tuple[PivotObserver]:
        """The observer: without it a part by heads would not know which heads before it ran dense."""
        return (self.observer,)

    def pipeline(self, name: str = "share") -> Pipeline:
        """A pipeline of this stage and its observer."""
        return Pipeline(self, observers=(self.observer,), name=name)

    @property
    def head_scope(self) -> HeadScope | None:
        """Each head for itself; with an inner method its scope."""
        return "head" if self.fallback is None else widest_scope(("head", self.fallback.head_scope))

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles and their lists, a pivot's pattern for each head, and the probe.

        With an inner method its bound, a copy of its carry, and the maps of both masks.
        """
        mine = default_workspace(call, self.block, 24)
        if self.fallback is None:
            return mine
        rows = call.q.numel() // call.q.shape[-1]
        return mine + self.fallback.plan_bound(call) + rows * (call.value_dim + 2) * 4 + default_workspace(call)

    def unsupported(self, call: AttentionCall) -> tuple[str, ...]:
        """A missing table, or one for another model; what the inner method objects to."""
        if self.clusters is None:
            return (MISSING,)
        reasons = []
        objection = None if self.table.table is None else self.table.table.objection(call)
        if objection is not None:
            reasons.append(f"the cluster table is for another model: {objection}")
        if self.fallback is not None:
            reasons += [f"inner {self.fallback.name}: {reason}" for reason in self.fallback.unsupported_plan(call)]
        return tuple(reasons)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError where the table, or the inner method, was made for another model."""
        if self.table.table is not None:
            self.table.table.check_model(model)
        if self.fallback is not None:
            self.fallback.check_model(model)

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """One sample of the last queries serves the tests, vertical-slash, and the plan's priority alike."""
        heads = self.table.layer(call.layer, call.geometry.heads, call.first_head)
        pivots = earlier(call, memory, self.key)
        inner = None if self.fallback is None else self.fallback.plan(call, Memory())
        if pivots is None and not heads.open:  # the whole layer takes the inner mask
            return vertical_slash(call, self.gamma, self.block) if inner is None else inner
        mass, rows, real = last_mass(call, self.block)
        choice = self._choice(call, mass, rows, real, heads, pivots)
        priority = SampledPriority(mass, real, self.block, by_column=choice.either)
        slashes = top_mass(mass.slashes, self.gamma) if inner is None else torch.zeros_like(choice.either)[..., None]
        tiles = pattern_tiles(call.geometry, slashes, self.block, choice, heads, pivots)
        if inner is None:
            stripes = top_mass(mass.columns, self.gamma)
            mask = columns_and_diagonals(call, tiles, stripes, self.block, exclude=choice.either)
            plan = Plan(mask, priority=priority)
        else:
            plan = mixed(call, inner, tiles, self.block, choice.either, priority)
        if not heads.open:
            return plan
        probe = choice.dense if plan.probe is None else plan.probe | choice.dense
        return evolve(plan, probe=probe, notes={**plan.notes, self.key: Evidence(heads, choice, plan.mask)})

    def _choice(
        self, call: AttentionCall, mass: SampledMass, rows: Tensor, real: Tensor, heads: LayerHeads,
        pivots: Pivots | None,
    ) -> Choice:  # fmt: skip
        geometry, blocks = call.geometry, by_block(mass.columns, self.block)
        if kernels.serve(blocks) and blocks.dtype == torch.float32:
            from . import kernels as gpu

            before = None if pivots is None else (pivots.made, pivots.last)
            return Choice(
                *gpu.choose(
                    geometry, blocks, rows.shape[1], heads.codes(blocks.device), before, call.layer, self.block,
                    self.tau, self.delta,
                )
            )  # fmt: skip
        seen = seen_blocks(geometry, rows, real, self.block)
        return choose(shares(blocks), seen, heads, pivots, call.layer, self.tau, self.delta)


@frozen
class PivotObserver:
    """Algorithm 2: the block map of each dense head, cut to its covering set, becomes its cluster's pivot.

    The head must have been computed in full: one that a refiner narrowed makes none, and in this layer no other does.
    """

    share: Share
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """Maps of the heads that make a pivot."""
        return default_workspace(call, self.share.block, 8)

    @uncast
    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """Nothing where the estimator is another one, or the layer makes no pivot."""
        share, evidence = self.share, plan.notes.get(self.share.key)
        if not isinstance(evidence, Evidence):
            return
        if result.probe is None:
            raise StageError("the executor gave no probe, from which share-prefill makes its pivots")
        heads, choice = evidence.heads, evidence.choice
        whole = choice.dense
        if plan.mask is not evidence.mask:
            pairs = torch.stack([mask.pairs() for mask in plan.computed()]).sum(0)
            whole = pairs == plan.mask.geometry.visible_counts().sum(-1, keepdim=True)
        head, _ = heads.dense(choice.dense)
        maps = on_blocks(of_heads(result.probe, head), plan.mask, share.block)  # [B, S, R, C], by open cluster
        if kernels.serve(maps):
            cover = top_mass(maps, share.gamma)
        else:
            cover = torch.cat([top_mass(part, share.gamma) for part in maps.split(PART, 2)], 2)
        old = earlier(call, memory, share.key)
        memory.put(share.key, renewed(call, old, share.table.count, heads, choice, whole, cover))


def pipeline(config: ShareConfig) -> Pipeline:
    """Build `share-prefill`."""
    return Share(**asdict(config, recurse=False)).pipeline("share-prefill")
