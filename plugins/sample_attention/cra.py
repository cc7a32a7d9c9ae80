"""Cumulative residual attention: what the sampled rows kept in the end (section 3.3)."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.errors import StageError
from sparseprefill.plan import Result

SAMPLED = "sample-attention"
"""The key of `Sampled` in `Plan.notes`."""


@frozen(eq=False)
class Sampled:
    """The sampled query rows of a call: index int64 ``[B, m]``, whether they exist, and their dense LSE ``[B, Hq, m]``.

    The LSE is a by-product of sampling, in natural log over all keys that a row may see.
    """

    rows: Tensor
    real: Tensor
    lse: Tensor


def cra(result: Result) -> Tensor:
    """``[B, Hq]``: the least attention mass that a sampled row kept; NaN for a batch row without queries.

    Exact, whatever refiners did to the mask, and no key is looked at again: ``exp(lse_sparse - lse_dense)``. Reaching
    alpha_c and alpha_s apart bounds the mean over the sample, not this minimum. No host synchronisation. Raises
    StageError where the plan is not of this method.
    """
    sampled = result.plan.notes.get(SAMPLED)
    if not isinstance(sampled, Sampled):
        raise StageError("the plan holds no samples: cra() takes a result of sample-attention")
    heads = result.lse.shape[1]
    sparse = torch.gather(result.lse, 2, sampled.rows[:, None].expand(-1, heads, -1))
    kept = torch.exp(sparse - sampled.lse).masked_fill(~sampled.real[:, None], torch.inf)
    return torch.where(sampled.real.any(1, keepdim=True), kept.amin(-1), torch.nan)
