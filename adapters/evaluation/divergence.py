"""How far one set of next-token distributions is from another."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

ROWS_AT_ONCE = 16
"""Rows of logits that are widened to float32 at once."""


@frozen
class Divergence:
    """Distributions of a sparse prefill beside dense's, over some rows.

    rows: how many. kl: mean of KL(dense || sparse) over the rows, in nats; worst: the largest. agreement: share of
    the rows in which both choose the same token. surprise, dense_surprise: mean negative log-likelihood, in nats, of
    the text's own tokens, NaN where none are known.
    """

    rows: int
    kl: float
    worst: float
    agreement: float
    surprise: float = math.nan
    dense_surprise: float = math.nan

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the text after the sparse prefill over that after the dense one."""
        return math.exp(self.surprise - self.dense_surprise)


def compare(dense: Tensor, sparse: Tensor, text: Tensor | None = None) -> Divergence:
    """Of log-probabilities ``[n, vocabulary]`` of dense (float32) and logits ``[n, vocabulary]`` of sparse.

    text: the tokens ``[n]`` that follow in the text, where they are known. One wait for the device.
    """
    kl, same, own, dense_own = [], [], [], []
    for first in range(0, dense.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        p, q = dense[rows].to(sparse.device), log_probabilities(sparse[rows])
        # 0 log 0 = 0: a token that dense excludes (-inf) adds nothing, whatever sparse makes of it.
        terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
        kl.append(terms.sum(-1).clamp(min=0.0))
        same.append(p.argmax(-1) == q.argmax(-1))
        if text is not None:
            token = text[rows].to(sparse.device)[:, None]
            own.append(-q.gather(1, token)[:, 0])
            dense_own.append(-p.gather(1, token)[:, 0])
    distance = torch.cat(kl).double()
    facts = [distance.mean(), distance.max(), torch.cat(same).double().mean()]
    if text is not None:
        facts += [torch.cat(own).double().mean(), torch.cat(dense_own).double().mean()]
    return Divergence(dense.shape[0], *torch.stack(facts).tolist())


def log_probabilities(logits: Tensor) -> Tensor:
    """float32 ``[n, vocabulary]``: logarithms of the distributions, in nats."""
    return torch.log_softmax(logits.float(), -1)


def pooled(parts: list[Divergence]) -> Divergence:
    """One divergence over the rows of several, such as those of several prompts."""
    rows = sum(part.rows for part in parts)

    def mean(name: str) -> float:
        return float(sum(getattr(part, name) * part.rows for part in parts)) / rows

    worst = max(part.worst for part in parts)
    return Divergence(rows, mean("kl"), worst, mean("agreement"), mean("surprise"), mean("dense_surprise"))
