"""The estimator, which reads pivots, and the observer, which writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.errors import StageError
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.statistics.sampled import SampledMass, last_rows, sampled_mass
from sparseprefill.statistics.select import top_mass
from sparseprefill.statistics.slashes import SampledPriority, columns_and_diagonals, slash_tiles

from . import mean_qk, scores
from .config import SINGLE, ShareConfig
from .decide import choose, pattern_tiles
from .heads import Clusters, LayerHeads, index, of_heads
from .pivots import KEY, earlier, renewed
from .records import Choice, Pivots

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Result
    from sparseprefill.profiles.identity import ModelIdentity
    from sparseprefill.stages import HeadScope

MISSING = (
    "no table of head clusters; make one with `sparseprefill cluster --model PATH` and pass clusters=TABLE, or "
    "clusters='single' to put all heads into one cluster"
)
PART = 256
"""Rows of a block map that are sorted at once; the kernel sorts nothing and takes all."""


@frozen(eq=False)
class Evidence:
    """What the estimator leaves for the observer. mask: as the estimator made it."""

    heads: LayerHeads
    choice: Choice
    mask: SparseMask

    def after(self, plan: Plan) -> Evidence:
        """The evidence for the plan that ran, without the dense heads from which a refiner took pairs."""
        if plan.mask is self.mask:
            return self
        pairs = torch.stack([mask.pairs() for mask in plan.computed()]).sum(0)
        allowed = plan.mask.geometry.visible_counts().sum(-1, keepdim=True)
        return evolve(self, choice=self.choice.of_whole(pairs == allowed))


@frozen(eq=False)
class ShareEstimator:
    """Algorithms 3 to 5: a pivot's pattern, all tiles, or vertical-slash, head by head.

    It looks at the call's last queries, and pivots serve the call that made them: it has no grain.
    """

    config: ShareConfig
    clusters: Clusters
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles and their lists, a pivot's pattern for each head, and the probe."""
        return default_workspace(call, self.config.block, 24)

    def unsupported(self, call: AttentionCall) -> str | None:
        """A missing table, or one for another model; a window, with mean_qk."""
        if self.config.clusters is None:
            return MISSING
        if call.window is not None and self.config.block_score == "mean_qk":
            return "block_score='mean_qk' knows no sliding window; use 'mass'"
        objection = None if self.clusters.table is None else self.clusters.table.objection(call)
        return None if objection is None else f"the cluster table is for another model: {objection}"

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError where the table was made for another model."""
        if self.clusters.table is not None:
            self.clusters.table.check_model(model)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """One sample of the last queries serves the tests, vertical-slash, and the plan's priority alike."""
        config, geometry = self.config, call.geometry
        rows, real = last_rows(call, config.block)
        mass = sampled_mass(call, rows, real, config.block)
        stripes, slashes = top_mass(mass.columns, config.gamma), top_mass(mass.slashes, config.gamma)
        heads = self.clusters.layer(call.layer, geometry.heads, call.first_head)
        pivots = earlier(call, memory)
        if pivots is None and not heads.open:
            tiles = slash_tiles(geometry, slashes, config.block)
            mask = columns_and_diagonals(call, tiles, stripes, config.block)
            return Plan(mask, priority=SampledPriority(mass, real, config.block))
        choice = self._choice(call, mass, rows, real, heads, pivots)
        tiles = pattern_tiles(geometry, slashes, config.block, choice, heads, pivots)
        mask = columns_and_diagonals(call, tiles, stripes, config.block, exclude=choice.either)
        priority = SampledPriority(mass, real, config.block, by_column=choice.either)
        if not heads.open:
            return Plan(mask, priority=priority)
        probe = choice.dense if config.block_score == "mass" else None
        return Plan(mask, probe=probe, priority=priority, notes={KEY: Evidence(heads, choice, mask)})

    def _choice(
        self, call: AttentionCall, mass: SampledMass, rows: Tensor, real: Tensor, heads: LayerHeads,
        pivots: Pivots | None,
    ) -> Choice:  # fmt: skip
        config, geometry = self.config, call.geometry
        sums, seen = config.block_score == "mass", None
        if sums:
            blocks = scores.block_sums(mass, config.block)
        else:
            seen = scores.seen_blocks(geometry, rows, real, config.block)
            blocks = mean_qk.last_scores(call, rows, real, seen, config.block)
        if kernels.serve(blocks) and blocks.dtype == torch.float32:
            from . import launch

            before = None if pivots is None else (pivots.made, pivots.last)
            return Choice(
                *launch.choose(
                    geometry, blocks, rows.shape[1], heads.codes(blocks.device), before, call.layer, config.block,
                    config.tau, config.delta, sums=sums,
                )
            )  # fmt: skip
        if seen is None:
            blocks, seen = scores.shares(blocks), scores.seen_blocks(geometry, rows, real, config.block)
        return choose(blocks, seen, heads, pivots, call.layer, config.tau, config.delta)


@frozen(eq=False)
class PivotObserver:
    """Algorithm 2: the block map of each dense head, cut to its covering set, becomes its cluster's pivot.

    The head must have been computed in full: one that a refiner narrowed makes none.
    """

    config: ShareConfig
    clusters: Clusters
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """Maps of the heads that make a pivot, and for a whole map's cover its sort in float64."""
        return default_workspace(call, self.config.block, 8 if self.config.coverage == "row" else 48)

    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """Nothing where the estimator is another one, or the layer makes no pivot."""
        evidence = plan.notes.get(KEY)
        if not isinstance(evidence, Evidence):
            return
        evidence = evidence.after(plan)
        cover = self._cover(self._maps(call, plan, result, evidence))
        memory.put(
            KEY, renewed(call, earlier(call, memory), self.clusters.count, evidence.heads, evidence.choice, cover)
        )

    def _maps(self, call: AttentionCall, plan: Plan, result: Result, evidence: Evidence) -> Tensor:
        """``[B, S, R, C]``: block scores of the heads that run dense, by open cluster."""
        heads, dense, block = evidence.heads, evidence.choice.dense, self.config.block
        if self.config.block_score == "mean_qk":
            return mean_qk.map_scores(call, heads.dense(dense)[0], block)
        if result.probe is None:
            raise StageError("the executor gave no probe, from which share-prefill makes its pivots")
        if kernels.serve(result.probe):
            from .launch import maker_maps

            device = result.probe.device
            maps = maker_maps(result.probe, dense, heads.codes(device), index(heads.open, device))
            return scores.on_blocks(maps, plan.mask, block)
        return scores.on_blocks(of_heads(result.probe, heads.dense(dense)[0]), plan.mask, block)

    def _cover(self, maps: Tensor) -> Tensor:
        """bool ``[B, S, R, C]``: the fewest tiles that carry gamma, of each row or of the map as a whole."""
        gamma = self.config.gamma
        if self.config.coverage == "row":
            if kernels.serve(maps):
                return top_mass(maps, gamma)
            return torch.cat([top_mass(part, gamma) for part in maps.split(PART, 2)], 2)
        # A map has many small numbers, whose running sum in float32 could fall short of gamma.
        whole = [top_mass(maps[:, i].flatten(1).double(), gamma) for i in range(maps.shape[1])]
        return torch.stack(whole, 1).view_as(maps)


def pipeline(config: ShareConfig) -> Pipeline:
    """Build `share-prefill`."""
    table = None if config.clusters in (None, SINGLE) else config.clusters
    clusters = Clusters(table, sharing=config.tau > 0)
    return Pipeline(
        ShareEstimator(config, clusters), observers=(PivotObserver(config, clusters),), name="share-prefill"
    )
