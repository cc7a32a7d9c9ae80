"""The record of the portable kernel: the last in every line."""

from __future__ import annotations

from sparseprefill.kernels.family.record import TYPES, Family, Features, Job, Launched
from sparseprefill.kernels.settings import HEAD_DIMS


def launch(job: Job) -> Launched:
    """Forward; its repair follows every kernel."""
    from sparseprefill.kernels.attention.launch import forward

    return forward(job)


PORTABLE = Family(
    name="portable",
    rank=0,
    launch=launch,
    features=Features(
        dtypes=TYPES,
        dims=HEAD_DIMS,
        widths=None,
        votes=True,
        carry=True,
        state=True,
        requests=True,
        pages=True,
        padding=True,
        window=True,
        softcap=True,
        sinks=True,
        repeats=True,
    ),
)
"""Triton on any GPU, and in Triton's interpreter."""
