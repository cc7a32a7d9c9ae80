"""What settings of methods cost and what they keep on a model, side by side: answers, fidelity, recall, and time.

Time is that of the attention of all layers, on the queries and keys that the model itself makes of a prompt, beside
dense attention in the same run; and that of a whole prefill, which also holds everything else that a model does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen

from sparseprefill.errors import SparsePrefillError

from ..bench.clock import Clock
from ..bench.layers import Layers, LayersTime
from ..evaluation.outcome import Summary
from .candidates import Candidate
from .fit import ModelReadings

KEPT = 0.98
"""Share of dense's right answers, inside the prompt and behind it, that a recommended setting keeps of each."""

NEAR = 1.1
"""Densities within this factor of the lowest count as equal to it: then time decides."""


@frozen(eq=False)
class Point:
    """A candidate on the prompts of one length.

    summary: over the prompts. stock: the same of the model's own attention. time: of the attention of all layers on the
    first prompt; None where it was not timed, and then `untimed` says why.
    """

    tokens: int
    candidate: Candidate
    summary: Summary
    stock: Summary
    time: LayersTime | None = None
    untimed: str = ""

    @property
    def error(self) -> str:
        """What stopped it on a prompt; empty where nothing did."""
        return next(iter(self.summary.failed.values()), "")

    @property
    def prefill_speedup(self) -> float | None:
        """Stock's prefill time over the candidate's; None where it failed on a prompt."""
        return self.summary.speed_up(self.stock)

    @property
    def pointless(self) -> bool:
        """Whether the model itself gave no right answer, inside the prompt or behind it, so that nobody else's say
        anything."""
        return any(asked and not right for right, asked in (self.stock.answers_inside, self.stock.answers))

    @property
    def kl(self) -> float:
        """KL(dense || sparse) of the next token in nats, mean over rows of the whole prompt; infinite where it
        failed."""
        found = self.summary.inside
        return float("inf") if found is None or self.error else found.kl

    @property
    def cost(self) -> float:
        """What it takes of dense attention's time; where that was not timed, of its pairs."""
        return self.summary.density if self.time is None else 1 / self.time.speedup


@frozen(eq=False)
class Reader:
    """The prompts of one length, read by the model itself. layers: of the first; None where they cannot be timed."""

    tokens: int
    readings: ModelReadings
    clock: Clock
    stock: Summary
    layers: Layers | None = field(repr=False)
    untimed: str = ""

    @classmethod
    def of(cls, tokens: int, readings: ModelReadings, clock: Clock) -> Reader:
        """Let the model read the prompts with its own attention."""
        stock = Summary.of([readings.stock(index) for index in range(readings.count)], readings.sizes[0].greedy)
        ids = readings.prompts[0].ids[: -readings.sizes[0].tail]
        device = readings.model.get_input_embeddings().weight.device
        try:
            layers = Layers.of(readings.model, torch.tensor([ids], device=device))
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return cls(tokens, readings, clock, stock, None, str(error).splitlines()[0])
        return cls(tokens, readings, clock, stock, layers)

    def read(self, candidate: Candidate) -> Point:
        """Let a candidate read the prompts. What stops it is told in the point."""
        readings = self.readings
        outcomes = [readings.run(candidate, index) for index in range(readings.count)]
        summary = Summary.of(outcomes, readings.sizes[0].greedy)
        time, untimed = None, self.untimed
        if self.layers is not None and not summary.failed:
            try:
                time = self.layers.time(candidate.pipeline(readings.identity).with_tail(readings.tail), self.clock)
            except (SparsePrefillError, torch.OutOfMemoryError) as error:
                untimed = str(error).splitlines()[0]
        return Point(self.tokens, candidate, summary, self.stock, time, untimed)


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that came through and that no other beats: with as many answers inside and behind the prompt, as small
    a KL and as small a cost, and less of one of them. None where the model itself cannot do the task."""

    def key(point: Point) -> tuple[int, int, float, float]:
        return -point.summary.answers_inside[0], -point.summary.answers[0], point.kl, point.cost

    done = [one for one in points if not one.error and not one.pointless]
    keys = [key(one) for one in done]
    return [
        one
        for one, mine in zip(done, keys, strict=True)
        if not any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in keys)
    ]


def recommended(points: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The setting that a method's points, as `frontier --json` writes them, speak for; None where none keeps enough.

    Of those that keep `KEPT` of dense's answers inside the prompt, and as much of those behind it, that of the lowest
    density; where several come within a tenth of it, the one whose attention takes the shortest time.
    """
    good = [one for one in points if not one["error"] and _keeps(one)]
    if not good:
        return None
    least = min(one["density"] for one in good)
    near = [one for one in good if one["density"] <= NEAR * least]
    return min(near, key=lambda one: (one["attention"]["seconds"] if one["attention"] else one["density"], _kl(one)))


def _keeps(point: Mapping[str, Any]) -> bool:
    parts = (point["inside"], point["end"])
    return all(not part["asked"] or part["right"] >= KEPT * part["dense_right"] for part in parts)


def _kl(point: Mapping[str, Any]) -> float:
    return float(point["inside"]["kl"])


def spread(settings: Sequence[dict[str, object]], most: int) -> list[dict[str, object]]:
    """So many of the settings at most, evenly from first to last; all where most is 0."""
    if most == 0 or len(settings) <= most:
        return list(settings)
    if most == 1:
        return [settings[len(settings) // 2]]
    return [settings[round(i * (len(settings) - 1) / (most - 1))] for i in range(most)]
