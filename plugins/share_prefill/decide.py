"""Algorithms 3 and 4: which heads of a layer share a pivot, and which run dense to make one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.divergence import js_distance

if TYPE_CHECKING:
    from .heads import LayerHeads
    from .pivots import Pivots


@frozen(eq=False)
class Choice:
    """bool ``[B, H]`` each: heads that share their cluster's pivot; heads that run dense. The rest: vertical-slash."""

    share: Tensor
    dense: Tensor


def choose(own: Tensor, seen: Tensor, heads: LayerHeads, pivots: Pivots | None, tau: float, delta: float) -> Choice:
    """From the heads' block-averaged attention `own` ``[B, H, C]`` over the blocks `seen` (bool ``[B, C]``).

    All heads at once: of a cluster without a pivot the first head that may make one runs dense, and the others do not
    wait for it.
    """
    cluster = heads.clusters(own.device)
    uniform = seen.to(own.dtype) / seen.sum(-1, keepdim=True).clamp(min=1)
    able = heads.members(own.device) & (js_distance(own, uniform[:, None]) < delta)
    makes = able & heads.makers(own.device)
    if pivots is None:
        share = torch.zeros_like(able)
    else:
        ready = pivots.ready[:, cluster]
        share = able & ready & (js_distance(own, pivots.last[:, cluster].to(own.dtype)) < tau)
        makes = makes & ~ready
    before = (cluster[:, None] == cluster).tril(-1)
    return Choice(share, makes & ~(makes[:, None] & before).any(-1))
