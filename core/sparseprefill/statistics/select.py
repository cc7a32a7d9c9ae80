"""Score -> keep functions that the papers share. Pure, on the device, without host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseprefill import kernels

BITS = 38
"""Of a row's largest score in units: what smaller scores hold below ``2^-37`` of it is rounded."""
SMALLEST = -100
"""Exponent of two; rows whose largest score is below it are measured as if it were there."""


def top_mass(scores: Tensor, share: float, least: int = 0, most: int | None = None) -> Tensor:
    """bool like `scores` ``[..., C]``: the smallest set of entries whose sum reaches ``share`` of the row's total.

    The entry that crosses the threshold is kept; of equal scores the earlier entry goes first. Scores are
    non-negative; negative ones and NaN count as 0, and no share of a row with an infinity is kept. A share of 1 or more
    keeps everything, entries of zero mass included. least, most: bounds on the number of entries, from the top; `most`
    goes before `least` and before the share.

    Sums are exact, and so the same on every device: scores count as whole numbers of their row's unit (`units`). As
    scores of float32 and below are rounded themselves, a sum short of the share by less than 2^-23 of it reaches it.
    """
    if share >= 1.0:
        if most is None:
            return torch.ones_like(scores, dtype=torch.bool)
        share, least = 0.0, most
    if scores.dtype != torch.float64:
        share *= 1 - 2**-23
    if kernels.serve(scores) and scores.dtype != torch.float64:
        from sparseprefill.kernels.statistics.select import top_mass_fwd

        return top_mass_fwd(scores, share, least, most)
    return by_sorting(scores, share, least, most)


def by_sorting(scores: Tensor, share: float, least: int, most: int | None) -> Tensor:
    """`top_mass` of a share below 1 in plain PyTorch, in the words of its definition."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    wide = torch.nan_to_num(wide.clamp(min=0), nan=0.0, posinf=torch.inf)
    ordered, order = torch.sort(wide, dim=-1, descending=True, stable=True)
    amounts = units(ordered)
    bound = (amounts.sum(-1, keepdim=True).double() * max(share, 0.0)).ceil().to(torch.int64)
    enough = amounts.cumsum(-1) - amounts < bound
    enough[..., :least] = True
    if most is not None:
        enough[..., most:] = False
    return torch.zeros_like(enough).scatter_(-1, order, enough)


def units(ordered: Tensor) -> Tensor:
    """int64 like `ordered` ``[..., C]``, descending and non-negative: each score in units of its row, rounded.

    The unit is a power of two by which the row's largest score takes 38 bits: sums of whole numbers do not depend on
    their order, and float64 holds them. 0 for rows with an infinity.
    """
    largest = ordered[..., :1]
    exponent = torch.frexp(largest).exponent.to(torch.int64) - 1
    power = BITS - 1 - exponent.clamp(min=SMALLEST)
    scale = (power + 1023 << 52).view(torch.float64)
    amounts = (ordered.double() * scale).round()
    return torch.where(largest < torch.inf, amounts, 0.0).to(torch.int64)
