"""Content of one KV head's keys, and its reading by query heads."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.testing.characters import QUIET, Character, solve
from sparseprefill.testing.rotary import FLOATS, HOST, Rotary, rotate, turn

TOPICS = 3
DIRECTIONS = 1 + 3 * TOPICS
"""Directions in the still pairs: the sink; salience of columns; topics of stripes; topics of spans."""
NORMS = (8.0, *[2.0] * TOPICS, *[6.0] * 2 * TOPICS)
"""Size of a key along each direction."""
STRIPES, TWO = 0.004, 0.4
"""Share of the columns in a topic of stripes; share of the passages in which two topics matter, and not one."""
SPANS, RUN = 0.01, (32, 256)
"""Share of the columns in a topic of spans; tokens of a run."""
PASSAGES = 24
TURN = 2.0
"""Size of a key in a fast pair."""
KEY_NOISE = QUERY_NOISE = 0.5


@frozen(eq=False)
class Content:
    """A KV head. fast: ``[D]``, in the fast pairs, what all keys but the first hold. basis: ``[DIRECTIONS, D]``.

    marks: ``[N, DIRECTIONS]``, how much of each direction a key holds. bounds: int64, first token of each passage but
    the first one.
    """

    fast: Tensor
    basis: Tensor
    marks: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, source: torch.Generator, rotary: Rotary, tokens: int) -> Content:
        """Drawn from a CPU generator."""
        pairs = len(rotary.speeds)
        still = rotary.still(tokens, -(-DIRECTIONS // 2))
        fast = rotary.fast & ~still
        phase = 2 * math.pi * torch.rand(pairs, generator=source, **FLOATS)
        template = torch.cat([torch.cos(phase) * fast, torch.sin(phase) * fast]) * TURN
        where = torch.nonzero(still.repeat(2))[:, 0]
        drawn = torch.randn(len(where), DIRECTIONS, generator=source, dtype=torch.float64, device=HOST)
        frame = torch.linalg.qr(drawn)[0]
        basis = torch.zeros(DIRECTIONS, 2 * pairs, **FLOATS)
        basis[:, where] = frame.T.float()
        salience = torch.randn(tokens, TOPICS, generator=source, **FLOATS)
        marks = torch.cat([torch.zeros(tokens, 1, **FLOATS), salience], 1)
        # A column in two topics would stand twice as high where both matter, so each is in one at most.
        topic = (torch.rand(tokens, generator=source, **FLOATS) / STRIPES).long()
        stripes = (topic[:, None] == torch.arange(TOPICS, device=HOST)).float()
        spans = torch.stack([_runs(source, tokens) for _ in range(TOPICS)], 1)
        special = (stripes + spans).sum(-1, keepdim=True) > 0
        marks = torch.cat([torch.where(special, QUIET * marks, marks), stripes, spans], 1)
        marks *= torch.tensor(NORMS, **FLOATS)
        marks[0] = 0.0
        marks[0, 0] = NORMS[0]
        return cls(template, basis, marks, _bounds(source, tokens))

    def to(self, device: torch.device | str) -> Content:
        """The same on a device."""
        return Content(*(x.to(device) for x in (self.fast, self.basis, self.marks, self.bounds)))

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the columns: those that are stripes, and those in spans, to one query."""
        held = (self.marks[:, 1 + TOPICS :] > 0).float().mean(0)
        return float(held[:TOPICS].mean()) * (1 + TWO), float(held[TOPICS:].mean())

    def keys(self, first: int, last: int) -> Tensor:
        """float32 ``[n, D]``, before noise and rotation."""
        x = self.marks[first:last] @ self.basis + self.fast
        if first == 0:
            x[0] -= self.fast
        return x


@frozen(eq=False)
class Reading:
    """A query head. fast: ``[D]``. weights: ``[passages, DIRECTIONS]``, how much it reads of each direction."""

    fast: Tensor
    weights: Tensor

    def to(self, device: torch.device | str) -> Reading:
        """The same on a device."""
        return Reading(self.fast.to(device), self.weights.to(device))

    def queries(self, content: Content, first: int, last: int) -> Tensor:
        """float32 ``[n, D]``, before noise and rotation."""
        at = torch.arange(first, last, device=content.bounds.device)
        weights = self.weights[torch.bucketize(at, content.bounds, right=True)]
        return weights @ content.basis + self.fast


def read(source: torch.Generator, content: Content, one: Character, rotary: Rotary, tokens: int) -> Reading:
    """A query head of a character, drawn from a CPU generator."""
    distances = _distances(source, tokens)
    fast = rotary.fast & ~rotary.still(tokens, -(-DIRECTIONS // 2))
    speeds, size = rotary.speeds[fast], math.sqrt(2 * len(rotary.speeds))
    logits = solve(one, speeds, distances, tokens, content.shares)
    # The head's logit at distance d is `peak * mean(cos(speed * (d - centre)))` if its pairs are the keys', turned.
    turned = torch.zeros_like(content.fast)
    for peak, centre in ((logits.local, 0), *((logits.slash, distance) for distance in distances)):
        turned += peak * size / (TURN**2 * len(speeds)) * rotate(content.fast, turn(rotary.speeds * -centre))
    passages = len(content.bounds) + 1
    weights, norms = torch.zeros(passages, DIRECTIONS, **FLOATS), torch.tensor(NORMS, **FLOATS)
    course = torch.randn(TOPICS, generator=source, **FLOATS)
    weights[:, 1 : 1 + TOPICS] = one.spread * course / course.norm()
    two = torch.rand(passages, 1, generator=source, **FLOATS) < TWO
    order = torch.rand(passages, TOPICS, generator=source, **FLOATS).argsort(-1)
    weights[:, 1 + TOPICS : 1 + 2 * TOPICS] = logits.stripes * ((order == 0) | (two & (order == 1)))
    order = torch.rand(passages, TOPICS, generator=source, **FLOATS).argsort(-1)
    weights[:, 1 + 2 * TOPICS :] = logits.spans * (order == 0)
    many = (one.rest + one.stripes + one.spans) / (1 - one.sink)
    for _ in range(3):
        # Noise of the keys lifts the mass of what many keys hold, the more the larger a query; the first key has none.
        squared = turned.square().sum() + (weights * size / norms).square().sum(-1)
        weights[:, 0] = (logits.sink + many * squared * KEY_NOISE**2 / (2 * size**2)) * (one.sink > 0)
    return Reading(turned, weights * size / norms)


def _distances(source: torch.Generator, tokens: int) -> tuple[int, int]:
    """Distances of two slashes: a near one, at 300 to 2,000 tokens, and one at up to a quarter of the prompt."""
    near, far = torch.rand(2, generator=source, dtype=torch.float64, device=HOST).tolist()
    longest = max(16, tokens // 4)
    return int(min(longest // 2, 300 + 1700 * near)), int(longest * (0.6 + 0.4 * far))


def _bounds(source: torch.Generator, tokens: int) -> Tensor:
    count = max(1, min(PASSAGES, tokens // 64)) - 1
    return (torch.rand(count, generator=source, dtype=torch.float64, device=HOST) * tokens).long().sort().values


def _runs(source: torch.Generator, tokens: int) -> Tensor:
    """0 and 1 for each key: runs of keys, about `SPANS` of all."""
    count = max(1, round(SPANS * tokens / (sum(RUN) / 2)))
    longest = max(1, min(RUN[1], tokens // 16))
    sizes = torch.randint(min(RUN[0], longest), longest + 1, (count,), generator=source, device=HOST)
    firsts = (torch.rand(count, generator=source, **FLOATS) * (tokens - longest)).long()
    step = torch.zeros(tokens + 1, **FLOATS)
    step.index_add_(0, firsts, torch.ones(count, **FLOATS))
    step.index_add_(0, firsts + sizes, -torch.ones(count, **FLOATS))
    return (step.cumsum(0)[:tokens] > 0.5).float()
