"""Two engines' answers to one prompt, token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen


@frozen
class Answer:
    """tokens: of the answer. logprobs: of each, what the likeliest tokens had there. cached: tokens of the prompt
    whose keys and values were there before."""

    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]
    cached: int = 0

    @classmethod
    def of(cls, output: Any) -> Answer:
        """From vLLM's RequestOutput, asked for log probabilities."""
        one = output.outputs[0]
        found = [{int(token): float(x.logprob) for token, x in step.items()} for step in one.logprobs]
        return cls([int(token) for token in one.token_ids], found, int(output.num_cached_tokens or 0))


@frozen(kw_only=True)
class Compared:
    """One prompt.

    cache: dtype of the KV cache, block: its block size, as asked for. turn: "first", or "cached" where a part of the
    prompt was in the prefix cache. tokens: of the prompt, of which `cached` were. generated: tokens compared.
    first: index of the first token that differs, None if all are equal. gap: by how much vLLM's own log probability of
    its token exceeds that of ours there; None if it is not known. logprobs: largest difference of log probabilities
    up to there. sparse_calls, fallbacks: of our engine in all turns.
    """

    cache: str
    block: int | None
    turn: str = "first"
    tokens: int = 0
    cached: int = 0
    generated: int = 0
    first: int | None = None
    gap: float | None = None
    logprobs: float = 0.0
    sparse_calls: int = 0
    fallbacks: Mapping[str, int] = field(factory=dict)
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether all tokens are, and log probabilities are numbers."""
        return self.first is None and not self.error and math.isfinite(self.logprobs)

    def tied(self, gap: float) -> bool:
        """Whether vLLM's own two candidates at the first difference lie no further apart than this."""
        return self.first is not None and self.gap is not None and self.gap <= gap and not self.error


def differ(stock: Answer, ours: Answer) -> dict[str, Any]:
    """Fields of `Compared`. Behind the first token that differs the texts do, and nothing is compared."""
    pairs = list(zip(stock.tokens, ours.tokens, strict=True))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    end = len(pairs) if first is None else first + 1
    off = [
        abs(theirs[token] - mine[token])
        for theirs, mine in zip(stock.logprobs[:end], ours.logprobs[:end], strict=True)
        for token in theirs.keys() & mine.keys()
    ]
    most = math.nan if any(map(math.isnan, off)) else max(off, default=0.0)
    found: dict[str, Any] = {"generated": len(pairs), "first": first, "logprobs": most}
    if first is not None:
        there, (theirs_token, our_token) = stock.logprobs[first], pairs[first]
        if our_token in there:
            found["gap"] = there[theirs_token] - there[our_token]
    return found
