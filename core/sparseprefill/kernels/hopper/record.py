"""The records of the Hopper kernel: in 16 bits, and in 8."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from attrs import evolve

from sparseprefill.kernels.family.record import Family, Features, square

CAPABILITY = (9, 0)


@cache
def _launcher() -> Any:
    # Gluon is experimental: names come and go with Triton's versions.
    from sparseprefill.kernels.hopper import launch

    return launch


def _run(name: str, *given: Any) -> Any:
    """A function of the launcher, which is imported when it is called."""
    return getattr(_launcher(), name)(*given)


HOPPER = Family(
    name="hopper",
    rank={CAPABILITY: 20},
    launch=partial(_run, "launch"),
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
    objection=partial(_run, "objection"),
    copied=partial(_run, "copied"),
)
"""Gluon, warp-specialised."""
HOPPER_INT8 = Family(
    name="hopper-int8",
    rank={CAPABILITY: 20},
    launch=partial(_run, "launch_eight"),
    features=evolve(
        HOPPER.features, precisions=("int8",), votes=False, carry=False, state=False, requests=False, padding=False
    ),
    objection=partial(_run, "objection_eight"),
    copied=partial(_run, "copied"),
)
"""Tiles in 8 bits, by SageAttention2's recipe: see `eight`."""
