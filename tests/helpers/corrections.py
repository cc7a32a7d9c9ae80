"""A corrector for tests: the library has none."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import evolve, field, frozen

import sparseprefill as sp
from sparseprefill.validate import whole


@frozen(kw_only=True)
class Scaled:
    """Each row of the output times a power of the share of its pairs that the mask computes."""

    power: int = field(default=1, validator=whole())
    grain: ClassVar[int] = 1
    head_scope: ClassVar[sp.HeadScope] = "head"

    def correct(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> sp.Result:
        """The result with another output; LSE and plan stay."""
        computed = torch.stack([mask.to_dense() for mask in plan.computed()]).any(0).sum(-1)
        seen = call.geometry.visible_counts()[:, None].clamp(min=1)
        share = (computed / seen).to(result.out.dtype) ** self.power
        return evolve(result, out=result.out * share[..., None])
