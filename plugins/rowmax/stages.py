"""The estimator: tiles to which a sampled row gives a large enough share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import uncast
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan, Remark

from .maxima import sampling, shares, workspace

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.stages import HeadScope

    from . import RowMaxConfig


@frozen
class RowMaxEstimator:
    """Keeps a key tile if its largest logit has a share of `eps` or more for any sampled row of the query tile.

    A query tile's choice depends on its own queries and on keys up to its end.
    """

    config: RowMaxConfig

    @property
    def grain(self) -> int:
        """Cutting a prompt at whole tiles changes nothing."""
        return self.config.block

    @property
    def head_scope(self) -> HeadScope:
        """Heads are looked at one by one, or all of a KV head."""
        return "group" if self.config.union == "group" else "head"

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
        """Maps of tiles and their lists, and what shares take."""
        block, stride = self.config.block, sampling(self.config, call.group).stride
        return default_workspace(call, block) + workspace(call, block, stride, by_kernels=kernels.serve_rows(call.q))

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles by share, the row's own tile, and the first; the shares are left as priority."""
        priority = PriorityScores(tiles=self._priority, tile_q=self.config.block, tile_k=self.config.block)
        if self.config.eps <= 0.0:
            return Plan(SparseMask.full(call, self.config.block), priority=priority)
        rules = {"keep": self.kept(call), "band": 0, "sink": int(self.config.sink)}
        mask = SparseMask.from_rules(call, self.config.block, **rules)
        said = ""
        if kernels.serve_rows(call.q):
            from . import launch

            said = launch.remark(call, self.config)
        return Plan(mask, priority=priority, notes={"rowmax": Remark(said)} if said else {})

    def kept(self, call: AttentionCall) -> Tensor:
        """bool ``[B, Hq, R, C]``, or of KV heads under a union: tiles of a large enough share."""
        if kernels.serve_rows(call.q):
            from . import launch

            return launch.kept_tiles(call, self.config)
        # What is no number is not known to be small.
        return ~(self._plain_shares(call) < self.config.eps)

    def shares(self, call: AttentionCall) -> Tensor:
        """float ``[B, Hq, R, C]``, or of KV heads under a union: the largest share that a sampled row gives a tile."""
        if kernels.serve_rows(call.q):
            from . import launch

            return launch.tile_shares(call, self.config)
        return self._plain_shares(call)

    def _plain_shares(self, call: AttentionCall) -> Tensor:
        every = shares(call, self.config.block, sampling(self.config, call.group))
        return every if self.config.union == "head" else every.unflatten(1, (-1, call.group)).amax(2)

    def _priority(self, call: AttentionCall) -> Tensor:
        found = self.shares(call)
        return found if self.config.union == "head" else found.repeat_interleave(call.group, 1)


def pipeline(config: RowMaxConfig) -> Pipeline:
    """Build `rowmax`."""
    return Pipeline(RowMaxEstimator(config), name="rowmax")
