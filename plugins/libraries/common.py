"""Gaps of both libraries, and the use of their results."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import extra
from sparseprefill.kernels.family.record import Job


@cache
def missing(package: str, name: str) -> str | None:
    """A reason where a package is not installed, and the extra that has it; imports the package above it alone."""
    try:
        there = find_spec(package) is not None
    except (ImportError, ValueError):  # the package above it is not there, or fails itself
        there = False
    return None if there else f"{package} is not installed: {extra(name)}"


def rows_reach_the_end(call: AttentionCall) -> str | None:
    """A reason where keys stand behind the last query row: both libraries count causality from the end of the keys."""
    g = call.geometry
    return None if g.q_offset + g.q_len == g.kv_len else "keys behind the last query row"


def keep(job: Job, out: Tensor, lse: Tensor) -> None:
    """Put out ``[B, Hq, Nq, Dv]`` and lse ``[B, Hq, Nq]``, the natural logarithm, where the job wants them.

    A row that sees no key has an output of 0, whatever a library leaves there.
    """
    made = job.arguments.outputs
    made.lse.copy_(lse)
    made.out.copy_(torch.where((lse == -torch.inf)[..., None], 0.0, out))
