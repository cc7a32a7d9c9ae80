"""The estimator, which reads pivots, and the observer, which writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.errors import StageError
from sparseprefill.lists import IndexLists
from sparseprefill.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.sampling import last_rows, sampled_mass
from sparseprefill.selection import top_mass
from sparseprefill.slashes import slash_tiles

from . import mean_qk, scores
from .config import SINGLE, ShareConfig
from .decide import choose
from .heads import Clusters, LayerHeads, index
from .pivots import KEY, Pivots, earlier

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.identity import ModelIdentity
    from sparseprefill.memory import Memory
    from sparseprefill.plan import Result

MISSING = (
    "no table of head clusters; make one with `sparseprefill cluster --model PATH` and pass clusters=TABLE, or "
    "clusters='single' to put all heads into one cluster"
)
PART = 256
"""Rows of a block map that are sorted at once."""


@frozen(eq=False)
class Evidence:
    """What the estimator leaves for the observer: who runs dense, bool ``[B, H]``, and a-hat ``[B, H, C]``."""

    heads: LayerHeads
    dense: Tensor
    own: Tensor


@frozen(eq=False)
class ShareEstimator:
    """Algorithms 3 to 5: a pivot's pattern, all tiles, or vertical-slash, head by head.

    It looks at the call's last queries, and pivots serve the call that made them: it has no grain.
    """

    config: ShareConfig
    clusters: Clusters

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
        """One sample of the last queries serves the tests and vertical-slash alike."""
        config, geometry = self.config, call.geometry
        rows, real = last_rows(call, config.block)
        mass = sampled_mass(call, rows, real, config.block)
        stripes = top_mass(mass.columns, config.gamma)
        tiles = slash_tiles(geometry, top_mass(mass.slashes, config.gamma), config.block)
        heads = self.clusters.layer(call.layer, geometry.heads)
        pivots = earlier(call, memory)
        if pivots is None and not heads.open:
            return Plan(self._mask(call, tiles, stripes))
        seen = scores.seen_blocks(geometry, rows, real, config.block)
        if config.block_score == "mass":
            own = scores.block_mass(mass, config.block)
        else:
            own = mean_qk.last_scores(call, rows, real, seen, config.block)
        choice = choose(own, seen, heads, pivots, config.tau, config.delta)
        if pivots is not None:
            shared = pivots.tiles[:, heads.clusters(own.device)]
            tiles = torch.where(choice.share[..., None, None], shared, tiles)
        tiles = tiles | choice.dense[..., None, None]
        stripes = stripes & ~(choice.share | choice.dense)[..., None]
        mask = self._mask(call, tiles, stripes)
        if not heads.open:
            return Plan(mask)
        probe = choice.dense if config.block_score == "mass" else None
        return Plan(mask, probe=probe, notes={KEY: Evidence(heads, choice.dense, own)})

    def _mask(self, call: AttentionCall, tiles: Tensor, stripes: Tensor) -> SparseMask:
        """Tiles ``[B, H, R, C]`` and the diagonal; columns ``[B, H, Nkv]`` for all rows of their head."""
        geometry, block = call.geometry, self.config.block
        chosen = SparseMask.from_tiles(call, tiles, block).tiles
        group = geometry.tile_columns(block)
        groups = geometry.tile_rows(group * block)
        lists = IndexLists.from_map(stripes[:, :, None].expand(-1, -1, groups, -1))
        return SparseMask(geometry, block, block, chosen, group, lists)


@frozen(eq=False)
class PivotObserver:
    """Algorithm 2: the block map of each dense head, cut to its covering set, becomes its cluster's pivot."""

    config: ShareConfig
    clusters: Clusters

    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: Memory) -> None:
        """Nothing where the estimator is another one, or the layer makes no pivot."""
        evidence = plan.notes.get(KEY)
        if not isinstance(evidence, Evidence):
            return
        device, own = call.q.device, evidence.own
        which = index(evidence.heads.open, device)
        chosen = evidence.dense[:, None] & (evidence.heads.clusters(device) == which[:, None])
        chosen = chosen & evidence.heads.members(device)
        head = chosen.to(torch.uint8).argmax(-1)
        maps = _of_heads(self._map(call, plan, result), head)
        pivots = earlier(call, memory)
        if pivots is None:
            pivots = Pivots.none(call, self.config.block, self.clusters.count, own.dtype)
        new = pivots.updated(call.layer, which, chosen.any(-1), _of_heads(own, head), self._cover(maps))
        memory.put(KEY, new)

    def _map(self, call: AttentionCall, plan: Plan, result: Result) -> Tensor:
        if self.config.block_score == "mean_qk":
            return mean_qk.map_scores(call, self.config.block)
        if result.probe is None:
            raise StageError("the executor gave no probe, from which share-prefill makes its pivots")
        return scores.on_blocks(result.probe, plan.mask, self.config.block)

    def _cover(self, maps: Tensor) -> Tensor:
        """bool ``[B, S, R, C]``: the fewest tiles that carry gamma, of each row or of the map as a whole."""
        gamma = self.config.gamma
        if self.config.coverage == "row":
            return torch.cat([top_mass(part, gamma) for part in maps.split(PART, 2)], 2)
        # A map has many small numbers, whose running sum in float32 could fall short of gamma.
        whole = [top_mass(maps[:, i].flatten(1).double(), gamma) for i in range(maps.shape[1])]
        return torch.stack(whole, 1).view_as(maps)


def _of_heads(x: Tensor, head: Tensor) -> Tensor:
    """x ``[B, H, *]`` at head ``[B, S]``: ``[B, S, *]``."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], head]


def pipeline(config: ShareConfig) -> Pipeline:
    """Build `share-prefill`."""
    table = None if config.clusters in (None, SINGLE) else config.clusters
    clusters = Clusters(table, sharing=config.tau > 0)
    return Pipeline(
        ShareEstimator(config, clusters), observers=(PivotObserver(config, clusters),), name="share-prefill"
    )
