"""The records of the Hopper kernel: in 16 bits, and in 8."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import evolve

from sparseprefill.kernels.family.record import Family, Features, Job, Launched, Wanted, square

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.mask import SparseMask

CAPABILITY = (9, 0)


@cache
def _launcher() -> Any:
    # Gluon is experimental: names come and go with Triton's versions.
    from sparseprefill.kernels.hopper import launch

    return launch


def objection(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
    """In 16 bits."""
    reason: str | None = _launcher().objection(call, mask, wanted)
    return reason


def unrounded(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
    """In 8 bits."""
    reason: str | None = _launcher().objection(call, mask, wanted) or _launcher().unrounded(call, mask)
    return reason


def copied(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> bool:
    """Of pages that it does not read, or reads more slowly than a copy."""
    return bool(_launcher().copied(call, mask, wanted))


def run(job: Job) -> Launched:
    """In 16 bits."""
    made: Launched = _launcher().launch(job)
    return made


def run_rounded(job: Job) -> Launched:
    """In 8 bits, but for heads beyond the bound."""
    made: Launched = _launcher().launch_eight(job)
    return made


HOPPER = Family(
    name="hopper",
    rank={CAPABILITY: 20},
    launch=run,
    features=Features(
        dims=square(64, 128, 256),
        widths=None,
        votes=True,
        carry=True,
        state=True,
        requests=True,
        pages=True,
        padding=True,
        sinks=True,
        repeats=True,
    ),
    objection=objection,
    copied=copied,
)
"""Gluon, warp-specialised."""
HOPPER_INT8 = Family(
    name="hopper-int8",
    rank={CAPABILITY: 20},
    launch=run_rounded,
    features=evolve(
        HOPPER.features, precisions=("int8",), votes=False, carry=False, state=False, requests=False, padding=False
    ),
    objection=unrounded,
    copied=copied,
)
"""Tiles in 8 bits, by SageAttention2's recipe: see `eight`."""
