"""The records of the Hopper kernel: in 16 bits, and in 8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from sparseprefill.kernels.family.record import Family, Features, Job, Launched, Wanted, square

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.mask import SparseMask

CAPABILITY = (9, 0)


def objection(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
    """In 16 bits."""
    from sparseprefill.kernels.hopper import launch

    return launch.objection(call, mask, wanted)


def unrounded(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> str | None:
    """In 8 bits."""
    from sparseprefill.kernels.hopper import launch

    return launch.objection(call, mask, wanted) or launch.unrounded(call, mask)


def copied(call: AttentionCall, mask: SparseMask, wanted: Wanted) -> bool:
    """Of pages that it does not read, or reads more slowly than a copy."""
    from sparseprefill.kernels.hopper import launch

    return launch.copied(call, mask, wanted)


def run(job: Job) -> Launched:
    """In 16 bits."""
    from sparseprefill.kernels.hopper import launch

    return launch.launch(job)


def run_rounded(job: Job) -> Launched:
    """In 8 bits, but for heads beyond the bound."""
    from sparseprefill.kernels.hopper import launch

    return launch.launch_eight(job)


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
