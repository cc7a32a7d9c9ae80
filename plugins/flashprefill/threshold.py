"""A threshold relative to the largest score of a row, in place of a sorted mass (FlashPrefill)."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.lists import IndexLists
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.plan import Plan
from sparseprefill.refiners.budget import ENTRIES, stripe_map
from sparseprefill.refiners.narrow import Choice, column_worth, scores_of, tile_worth
from sparseprefill.stages import HeadScope
from sparseprefill.validate import number, whole

GROUP = 2048
"""Rows of a group of stripes, as `RelativeThreshold.workspace` takes them to be."""


@frozen
class RelativeThreshold:
    """Keeps the tiles whose score is at least `share` of the largest score of their query tile.

    The largest is taken over all key tiles in reach, those of the diagonal and the first included, whether the plan
    holds them or not. Nothing is sorted and nothing summed: one comparison per tile. share: alpha; 0 keeps everything,
    more keeps less. The authors choose it so that about 70 % of the tiles stay at 4,096 tokens: 0.08 to 0.18.
    sink, local: of the tiles that the plan holds the first `sink`, the `local` before the diagonal, and the diagonal
    stay whatever they score. (The authors' last two query tiles, which see everything, are `DenseRows`.)

    It takes away, and adds no tile but a diagonal one: behind an estimator with every key (``xattention`` at
    ``threshold=1``, ``bfla`` at ``keep_mass=1``) it chooses alone. Stripes are held against the largest score of a key
    column that their group can see. A carry's region stays. A score of NaN is kept by nothing but a share of 0.

    Raises ParameterError for a plan without scores.

    Source: FlashPrefill (arXiv 2603.06199), its threshold as in the authors' released code: keep J where
    ``E(I, J) >= alpha * max_J' E(I, J')``. The scores are those of whatever estimator there is, not theirs.
    """

    share: float = field(validator=number(0.0, 1.0))
    sink: int = field(default=2, kw_only=True, validator=whole(0))
    local: int = field(default=3, kw_only=True, validator=whole(0))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, some scores of columns, and lists of the stripes of groups of `GROUP` rows."""
        geometry = call.geometry
        lists = geometry.batch * geometry.heads * geometry.tile_rows(GROUP) * (geometry.kv_len + 1) * 4
        return default_workspace(call) + lists + 16 * max(ENTRIES, geometry.batch * geometry.kv_len)

    @uncast
    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Drops the tiles and stripes below the threshold."""
        scores_of(plan, self, "leave it out")
        if self.share == 0:
            return plan
        at, mask = Choice.of(call, plan), plan.mask
        good = self._above(tile_worth(plan, call, *at.grid), at.reach)
        keep = at.tiles & good | at.ends(call.geometry, self.sink, self.local)
        if mask.stripes is None:
            return at.narrowed(plan, keep, None)
        return at.narrowed(plan, keep, self._stripes(call, plan), mask.group_rows // at.grid[0], disjoint=False)

    def _above(self, scores: Tensor, seen: Tensor) -> Tensor:
        """bool: finite scores ``[..., C]`` that reach the share of the largest that is seen."""
        largest = torch.where(seen, scores, 0.0).amax(-1, keepdim=True).clamp(min=0.0)
        return scores >= self.share * largest

    def _stripes(self, call: AttentionCall, plan: Plan) -> IndexLists:
        """The plan's stripes that are left, some heads and groups at a time."""
        geometry, rows = call.geometry, plan.mask.group_rows
        position = geometry.tiles(rows) * rows
        column = torch.arange(geometry.kv_len, device=geometry.device)
        groups = position.shape[1]
        step = max(1, ENTRIES // (geometry.batch * geometry.kv_len))
        heads, some = max(1, step // groups), min(step, groups)
        lists = []
        for head in range(0, geometry.heads, heads):
            here, parts = slice(head, min(head + heads, geometry.heads)), []
            for first in range(0, groups, some):
                part = range(first, min(first + some, groups))
                at = position[:, part.start : part.stop, None]
                seen = column < at + rows
                if geometry.window is not None:
                    seen = seen & (column > at - geometry.window)
                worth = column_worth(plan, call, at[..., 0], here)
                good = self._above(worth, seen[:, None])
                parts.append(IndexLists.from_map(stripe_map(plan.mask, here, part) & good))
            lists.append(IndexLists.joined(parts, 2))
        return IndexLists.joined(lists, 1)
