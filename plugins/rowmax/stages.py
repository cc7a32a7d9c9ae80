"""The estimator: columns of keys to which a sampled row gives a large enough share."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.geometry import by_block
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Remark
from sparseprefill.stages import HeadScope

from . import RowMaxConfig
from .maxima import chosen, sampling, shares, workspace

PER_COLUMN = 8
"""Bytes for each pair of a query tile and a column: maps of them, and their lists."""


@frozen
class RowMaxEstimator:
    """Keeps a column of keys if its largest logit has a large enough share for any sampled row of the query tile.

    Columns are key tiles, or the narrower ones of `width`, which become stripes.

    A query tile's choice depends on its own queries and on keys up to its end.
    """

    config: RowMaxConfig
    repeats: ClassVar[bool] = True

    @property
    def grain(self) -> int:
        """Cutting a prompt at whole tiles changes nothing."""
        return self.config.block

    @property
    def head_scope(self) -> HeadScope:
        """Heads are looked at one by one, or all of a KV head."""
        return "group" if self.config.union == "group" or self.config.shares_strong else "head"

    def unsupported(self, call: AttentionCall) -> str | None:
        """Eight bits, where they are asked for and the device has no products of them."""
        if self.config.precision != "fp8":
            return None
        if kernels.serve_rows(call.q):
            from . import launch

            if launch.in_8_bits(call, "fp8"):
                return None
        return (
            f"rowmax: precision='fp8' needs float16 or bfloat16 on an NVIDIA GPU of capability 8.9 or above, not "
            f"{call.q.dtype} on {call.q.device}: pass 'auto' or 'exact'"
        )

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles and columns with their lists, and what shares take."""
        block, width, stride = self.config.block, self.config.column, sampling(self.config, call.group).stride
        found = workspace(call, block, width, stride, by_kernels=kernels.serve_rows(call.q))
        if width < block:
            geometry = call.geometry
            columns = geometry.tile_rows(block) * geometry.tile_columns(width)
            found += geometry.batch * geometry.heads * columns * PER_COLUMN
        return default_workspace(call, block) + found

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Columns by share, the row's own tile, and the first; the shares are left as priority."""
        block, width = self.config.block, self.config.column
        priority = PriorityScores(tiles=self._priority, tile_q=block, tile_k=block)
        if self.config.everything:
            return Plan(SparseMask.full(call, block), priority=priority)
        if width == block:
            rules = {"keep": self.kept(call), "band": 0, "sink": int(self.config.sink)}
            mask = SparseMask.from_rules(call, block, **rules)
        else:
            tiles = SparseMask.from_rules(call, block, band=0, sink=int(self.config.sink))
            columns = TileMap(geometry=call.geometry, tile_q=block, tile_k=width, keep=self.kept(call, apart=True))
            mask = evolve(tiles, stripes=columns.lists, stripe_width=width, disjoint=True)
        said = ""
        if kernels.serve_rows(call.q):
            from . import launch

            said = launch.remark(call, self.config)
        return Plan(mask, priority=priority, notes={"rowmax": Remark(said)} if said else {})

    def kept(self, call: AttentionCall, *, apart: bool = False) -> Tensor:
        """bool ``[B, Hq, R, C]``, or of KV heads under a union: columns of a large enough share.

        apart: without those of the row's own tile and, with a sink, of the first, which are kept as tiles.
        """
        if kernels.serve_rows(call.q):
            from . import launch

            return launch.kept_tiles(call, self.config, apart=apart)
        keep = chosen(call, self.config)
        if self.config.union == "group":
            keep = keep.unflatten(1, (-1, call.group)).any(2)
        if apart:
            each = self.config.block // self.config.column
            column = torch.arange(keep.shape[3], device=keep.device)
            own = call.geometry.tiles(self.config.block)[:, None, :, None] * each  # [B, 1, R, 1]
            keep &= (column < own) & (column >= each * int(self.config.sink))
        return keep

    def shares(self, call: AttentionCall) -> Tensor:
        """float ``[B, Hq, R, C]``, or of KV heads under a union: the largest share of a sampled row for a column."""
        if kernels.serve_rows(call.q):
            from . import launch

            return launch.tile_shares(call, self.config)
        every = shares(call, self.config.block, self.config.column, sampling(self.config, call.group))
        return every if self.config.union == "head" else every.unflatten(1, (-1, call.group)).amax(2)

    def _priority(self, call: AttentionCall) -> Tensor:
        """Shares of whole tiles: what their columns have together."""
        found = by_block(self.shares(call), self.config.block // self.config.column)
        return found if self.config.union == "head" else found.repeat_interleave(call.group, 1)


def pipeline(config: RowMaxConfig) -> Pipeline:
    """Build `rowmax`."""
    return Pipeline(RowMaxEstimator(config), name="rowmax")
