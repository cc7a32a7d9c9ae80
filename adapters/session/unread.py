"""Rows of a last layer that nobody reads: the call without them, and its result in the size of the whole call."""

from __future__ import annotations

import math

from attrs import evolve
from torch.nn import functional

from sparseprefill.call import AttentionCall
from sparseprefill.plan import Parts, Result

TILE = 128
"""Query rows at whose multiples a call is cut, so that the tiles that stay are those of the whole call."""


def read_part(call: AttentionCall, rows: int) -> AttentionCall:
    """The call's last query rows, `rows` of them and what goes before them in their tile; the call itself where that
    is all of it."""
    offset = call.geometry.q_offset
    first = (offset + call.q.shape[2] - rows) // TILE * TILE - offset
    return call if first <= 0 else evolve(call, q=call.q[:, :, first:], q_offset=offset + first)


def as_whole(result: Result, part: AttentionCall, call: AttentionCall) -> Result:
    """The result of a call's last rows as one of the call: zeros in the rows before them, and an LSE of -inf.

    Densities are shares of the whole call's pairs.
    """
    missing = call.q.shape[2] - part.q.shape[2]
    out = functional.pad(result.out, (0, 0, missing, 0))
    lse = functional.pad(result.lse, (missing, 0), value=-math.inf)
    return evolve(result, out=out, lse=lse, parts=Parts(call.geometry, 1, result.pairs()))
