"""The Jensen-Shannon distance, by which several papers compare block-pooled attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence (log base 2) over the last dimension: from 0 to 1.

    p, q: distributions ``[..., C]``. Entries of zero mass count for nothing, in one or in both.
    """
    tiny = torch.finfo(p.dtype).tiny  # halves and logarithms of denormal numbers are not to be trusted
    p, q = torch.where(p < tiny, 0.0, p), torch.where(q < tiny, 0.0, q)
    both = torch.where(p + q == 0, 1.0, p + q)
    terms = torch.xlogy(p, 2 * p / both) + torch.xlogy(q, 2 * q / both)
    divergence: Tensor = terms.sum(-1) / (2 * math.log(2))
    return divergence.clamp(0.0, 1.0).sqrt()
