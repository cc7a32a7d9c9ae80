"""What flows between stages: a Plan into the executor, a Result out of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from attrs import field, frozen
from torch import Tensor

from sparseprefill.errors import MaskError
from sparseprefill.mask.mask import SparseMask, density
from sparseprefill.parts.record import Parts
from sparseprefill.softmax import SoftmaxState

EMPTY: Mapping[str, Any] = MappingProxyType({})


@frozen(eq=False)
class Carry:
    """Attention that an estimator has computed already: its softmax state and the region it covers."""

    state: SoftmaxState
    region: SparseMask


@frozen(eq=False)
class Plan:
    """What an executor shall compute.

    mask: tiles and stripes still to do; disjoint from `carry.region`. carry: real output made on the way, or None.
    probe: bool ``[B, Hq]``, heads whose attention mass per tile of the mask is wanted in `Result.probe`, or None.
    notes: evidence that a method keeps for its own observer.
    """

    mask: SparseMask
    carry: Carry | None = None
    probe: Tensor | None = field(default=None, kw_only=True)
    notes: Mapping[str, Any] = field(default=EMPTY, kw_only=True)


@frozen(eq=False)
class Result:
    """What was computed.

    out: ``[B, Hq, Nq, Dv]`` in the call's dtype, zeros in padding rows. lse: ``[B, Hq, Nq]`` float32 (float64 for
    float64 calls), natural log over the keys computed, sinks left out, -inf in padding rows.
    plan: what was executed; MaskError of a call that ran in parts, which keep theirs only while they run.
    probe: float32 ``[B, Hq, R, C]``, attention mass of each tile averaged over the tile's real rows; zero for heads
    that were not probed and tiles that the mask does not hold. None if nothing was probed, or in parts.
    parts: of a call that ran in parts (`Pipeline.workspace`), what is known of their plans; None otherwise.
    dense: why a gated pipeline ran dense attention instead of its stages; empty where the stages ran.
    """

    out: Tensor
    lse: Tensor
    _plan: Plan | None
    probe: Tensor | None = None
    parts: Parts | None = field(default=None, kw_only=True)
    dense: str = field(default="", kw_only=True)

    @property
    def plan(self) -> Plan:
        """What was executed."""
        if self._plan is None:
            count = "several" if self.parts is None else self.parts.count
            raise MaskError(f"the call ran in {count} parts, and their plans are gone: result.parts has what is left")
        return self._plan

    @cached_property
    def mask(self) -> SparseMask:
        """Everything computed, the carry's region included. MaskError where parts had masks too large to keep."""
        if self.parts is not None:
            return self.parts.mask
        carry = self.plan.carry
        return self.plan.mask if carry is None else carry.region | self.plan.mask

    @property
    def density(self) -> float:
        """Pairs computed / causal pairs (host sync)."""
        if self.parts is not None:
            return density.share(self.parts.pairs, self.parts.geometry)
        return self.mask.density
