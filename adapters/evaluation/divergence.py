"""How far one set of next-token distributions is from another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

ROWS_AT_ONCE = 16
"""Rows of logits that are widened to float32 at once."""


@frozen(eq=False)
class Divergence:
    """Distributions of a sparse prefill beside dense's, over some rows.

    each: KL(dense || sparse) of every row, in nats, float64 ``[n]`` on the CPU. agreement: share of the rows in which
    both choose the same token. surprise, dense_surprise: mean negative log-likelihood, in nats, of the text's own
    tokens, NaN where none are known.
    """

    each: Tensor = field(repr=False)
    agreement: float
    surprise: float = math.nan
    dense_surprise: float = math.nan

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.each.numel()

    @property
    def kl(self) -> float:
        """Mean KL(dense || sparse) over the rows, in nats."""
        return float(self.each.mean())

    @property
    def high(self) -> float:
        """The 99th percentile of the rows' KL, in nats."""
        return float(self.each.quantile(0.99))

    @property
    def worst(self) -> float:
        """The largest KL of a row, in nats."""
        return float(self.each.max())

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the text after the sparse prefill over that after the dense one."""
        return math.exp(self.surprise - self.dense_surprise)

    @property
    def nll_ratio(self) -> float:
        """Mean negative log-likelihood of the text after the sparse prefill over that after the dense one."""
        return self.surprise / self.dense_surprise if self.dense_surprise else math.nan

    @property
    def figures(self) -> dict[str, float | int | None]:
        """Everything but the rows one by one, by name; None for what is not known."""
        names = ("rows", "kl", "high", "worst", "agreement", "surprise", "dense_surprise", "nll_ratio")
        known = {name: getattr(self, name) for name in names}
        return {name: None if value != value else value for name, value in known.items()}


def compare(dense: Tensor, sparse: Tensor, text: Tensor | None = None) -> Divergence:
    """Logits ``[n, vocabulary]`` of dense beside those of sparse; dense's may be log-probabilities, on any device.

    text: the tokens ``[n]`` that follow in the text, where they are known. One wait for the device.
    """
    kl, same, own, dense_own = [], [], [], []
    for first in range(0, dense.shape[0], ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        p, q = log_probabilities(dense[rows].to(sparse.device)), log_probabilities(sparse[rows])
        # 0 log 0 = 0: a token that dense excludes (-inf) adds nothing, whatever sparse makes of it.
        terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
        kl.append(terms.sum(-1).clamp(min=0.0))
        same.append(p.argmax(-1) == q.argmax(-1))
        if text is not None:
            token = text[rows].to(sparse.device)[:, None]
            own.append(-q.gather(1, token)[:, 0])
            dense_own.append(-p.gather(1, token)[:, 0])
    columns = [torch.cat(kl).double(), torch.cat(same).double()]
    columns += [torch.cat(part).double() for part in (own, dense_own) if part]
    each, *means = torch.stack(columns).cpu()
    return Divergence(each, *(float(one.mean()) for one in means))


def log_probabilities(logits: Tensor) -> Tensor:
    """float32 ``[n, vocabulary]``: logarithms of the distributions, in nats."""
    return torch.log_softmax(logits.float(), -1)


def pooled(parts: Sequence[Divergence]) -> Divergence:
    """One divergence over the rows of several, such as those of several prompts."""
    each = torch.cat([part.each for part in parts])

    def mean(name: str) -> float:
        return float(sum(getattr(part, name) * part.rows for part in parts)) / each.numel()

    return Divergence(each, mean("agreement"), mean("surprise"), mean("dense_surprise"))
