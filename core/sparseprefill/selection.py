"""Score -> keep functions that the papers share. Pure, on the device, without host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def top_mass(scores: Tensor, share: float, least: int = 0, most: int | None = None) -> Tensor:
    """bool like `scores` ``[..., C]``: the smallest set of entries whose sum reaches ``share`` of the row's total.

    The entry that crosses the threshold is kept; of equal scores the earlier entry goes first. Scores are
    non-negative. A share of 1 or more keeps everything, entries of zero mass included. least, most: bounds on the
    number of entries, from the top; `most` goes before `least` and before the share.
    """
    if share >= 1.0 and most is None:
        return torch.ones_like(scores, dtype=torch.bool)
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    enough = before < (share * scores.sum(-1, keepdim=True) if share < 1.0 else torch.inf)
    enough[..., :least] = True
    if most is not None:
        enough[..., most:] = False
    return torch.zeros_like(enough).scatter_(-1, order, enough)
