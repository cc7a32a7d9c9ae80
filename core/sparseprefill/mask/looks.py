"""Looks at the values of masks that stages hand over, where that waits for nobody: on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

from torch import Tensor

from sparseprefill.errors import MaskError
from sparseprefill.mask.lists import readable
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.recorded import RECORDING, apart

SHOWN = 64
"""Query rows at once whose keys are looked for."""


def check_disjoint(mask: SparseMask, region: SparseMask) -> None:
    """MaskError for a mask with pairs of a carry's region; also for lists that are none."""
    if not readable(mask.geometry.device):
        return
    if RECORDING.get() is not None:
        apart(check_disjoint, mask, region)
        return
    twice = int((mask.pairs() + region.pairs() - (mask | region).pairs()).sum())
    if twice:
        remedy = "they would count twice; pass the mask without them, as in `mask - region`"
        raise MaskError(f"Plan.mask holds {twice} pairs of the carry region, which Plan.carry has computed: {remedy}")


def keyless(masks: Sequence[SparseMask], lse: Tensor, first_head: int) -> str:
    """The rows that masks left, where a real query row of log-sum-exp -inf has no key in any of them; empty elsewhere.

    masks: all that was computed. lse: ``[B, Hq, Nq]`` of it. first_head: number of head 0, for the message.
    """
    geometry = masks[0].geometry
    if not readable(geometry.device) or not bool(lse.isneginf().any()):
        return ""
    empty = lse.isneginf() & geometry.real_queries()[:, None]
    if not bool(empty.any()):  # padding
        return ""
    try:
        for mask in masks:
            mask.check()
    except MaskError as error:  # lists of which their maker said that they are sound
        return f"lists that are none: {error}"
    for some in empty.any(0).any(0).nonzero()[:, 0].split(SHOWN):
        held = reduce(or_, (mask.to_dense(some).any(-1) for mask in masks))
        lost = (empty[:, :, some] & ~held).nonzero()
        if len(lost):
            batch, head, row = lost[0].tolist()
            shown = f"batch row {batch}, head {head + first_head}, query row {int(some[row])} is the first"
            remedy = "every row must keep one, such as its own: keep the diagonal, as `SparseMask.from_tiles` does"
            return f"query rows without a key, so that their LSE is -inf ({shown}): {remedy}"
    return ""
