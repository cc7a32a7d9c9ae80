"""Score -> keep functions that the papers share. Pure, on the device, without host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def top_mass(scores: Tensor, share: float) -> Tensor:
    """bool like `scores` ``[..., C]``: the smallest set of entries whose sum reaches ``share`` of the row's total.

    The entry that crosses the threshold is kept; of equal scores the earlier entry goes first. Scores are
    non-negative. A share of 1 or more keeps everything, entries of zero mass included.
    """
    if share >= 1.0:
        return torch.ones_like(scores, dtype=torch.bool)
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    enough = before < share * scores.sum(-1, keepdim=True)
    return torch.zeros_like(enough).scatter_(-1, order, enough)
