"""Which records of attention kernels a test knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from sparseprefill import AttentionCall, SparseMask
from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.family import choose as choosing
from sparseprefill.kernels.family import known as handing
from sparseprefill.kernels.family.choose import Choice, choose
from sparseprefill.kernels.family.record import Family, Features, Job, Launched, Wanted, square

VOTING = (128, 64, 64)
EVERY: dict[str, Any] = dict.fromkeys(("votes", "carry", "state", "requests", "pages", "padding", "sinks"), True)


def only(patch: pytest.MonkeyPatch, *families: Family) -> None:
    """Nothing but these kernels and the portable one, behind them; each on every device, and none has failed yet."""
    know(patch, *(evolve(one, rank=20) for one in families), PORTABLE)
    patch.setattr(choosing, "FAILED", {})


def know(patch: pytest.MonkeyPatch, *families: Family) -> None:
    """Executors that are built from now on know these kernels and no others."""
    patch.setattr(handing, "installed", lambda: families)


def chosen(call: AttentionCall, mask: SparseMask, **wanted: Any) -> Choice:
    """The choice for a call, among the kernels that an executor knows that is built now."""
    return choose(call, mask, Wanted(**wanted), handing.known())


def refused(family: Family, call: AttentionCall, mask: SparseMask, **wanted: Any) -> Any:
    """The reason of a kernel against a call, by its features or by itself; None where it serves."""
    asked = Wanted(**wanted)
    return family.features.lacking(call, mask, asked) or family.objection(call, mask, asked)


class Made:
    """A made-up kernel that takes every call of 16 bits without a softcap, and here computes nothing.

    error: what its launches raise. jobs: what it was launched with.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.jobs: list[Job] = []
        features = Features(dims=square(64, 128), widths=None, window=True, **EVERY)
        self.family = Family(name="made-up", rank=20, launch=self.launch, features=features)

    def launch(self, job: Job) -> Launched:
        """Zeros, of which no block is repaired."""
        self.jobs.append(job)
        if self.error is not None:
            raise self.error
        outputs = job.arguments.outputs
        for made in (outputs.out, outputs.lse, *outputs.state):
            if made is not None:
                made.zero_()
        return Launched(nonfinite=torch.zeros(job.arguments.flags, dtype=torch.int8), voting=VOTING)
