"""What settings of methods cost and what they keep on a model, side by side: answers, fidelity, recall, and time.

Time is that of the attention of all layers, on the queries and keys that the model itself makes of a prompt, beside
dense attention in the same run; and that of a whole prefill, which also holds everything else that a model does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen
from sparseprefill.adapters.calibration.candidates import Candidate
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.evaluation.outcome import Summary

from lab.bench.clock import Clock
from sparseprefill import structure
from sparseprefill.config import from_config
from sparseprefill.errors import ParameterError, SparsePrefillError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline

from .exams import Asked
from .layers import Layers, LayersTime

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
    readings: Asked
    clock: Clock
    stock: Summary
    layers: Layers | None = field(repr=False)
    untimed: str = ""

    @classmethod
    def of(cls, tokens: int, readings: Asked, clock: Clock) -> Reader:
        """Let the model read the prompts with its own attention."""
        stock = Summary.of([readings.stock(index) for index in range(readings.count)], readings.sizes.greedy)
        ids = readings.prompts[0].ids[: -readings.held_back(0)]
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
        summary = Summary.of(outcomes, readings.sizes.greedy)
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
    """The setting that a method's points, as the command's --json has them, speak for; None where none keeps enough.

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


def cheapest(points: Iterable[Mapping[str, Any]], kl: float) -> Mapping[str, Any] | None:
    """Of a method's points, as the command's --json has them, the one of lowest density with at most so large a KL;
    None where there is none."""
    good = [one for one in points if not one["error"] and _kl(one) <= kl]
    return min(good, key=lambda one: (one["density"], _kl(one)), default=None)


def fastest(points: Iterable[Mapping[str, Any]], copies: float) -> Mapping[str, Any] | None:
    """Of a method's points, as the command's --json has them, the one whose attention takes the shortest time and that
    keeps this share of what dense attention copies; None where there is none."""

    def keeps(one: Mapping[str, Any]) -> bool:
        return bool(one["copies"]) and one["copies"]["right"] >= copies * one["copies"]["dense_right"]

    good = [one for one in points if not one["error"] and one["attention"] and keeps(one)]
    return min(good, key=lambda one: (one["attention"]["seconds"], _kl(one)), default=None)


def best_settings(
    path: Path, seed: int, texts: int, kl: Sequence[float] = (), copies: float | None = None
) -> dict[str, list[dict[str, Any]]]:
    """By method, the settings that a file of --json speaks for at its longest length: the cheapest one for each limit
    of the KL and the fastest one that keeps the share `copies`, each once, or where neither is given the one that keeps
    the answers.

    seed, texts: of the run that wants them; CommandError where its texts are among those of the file, or the file holds
    something else. Tables, such as clusters, are left to the run.
    """
    try:
        found = structure.parsed(structure.read(path))
        seeds = range(found["seed"], found["seed"] + found["texts"])
        longest = max(one["tokens"] for one in found["points"])
        points = [one for one in found["points"] if one["tokens"] == longest]
        made: dict[str, list[dict[str, Any]]] = {}
        for name in dict.fromkeys(one["method"] for one in points):
            own = [one for one in points if one["method"] == name]
            chosen = [cheapest(own, most) for most in sorted(kl)]
            chosen += [] if copies is None else [fastest(own, copies)]
            chosen = chosen or [recommended(own)]
            settings = [_scalars(one["parameters"]) for one in chosen if one is not None]
            if settings:
                made[name] = [one for index, one in enumerate(settings) if one not in settings[:index]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(f"--from {path}: {error!r}: pass what --json FILE wrote") from error
    if set(seeds) & set(range(seed, seed + texts)):
        raise CommandError(f"--from {path}: its settings were found on the same texts: pass a --seed other than {seed}")
    return made


def _scalars(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if not isinstance(value, dict)}


@frozen(kw_only=True)
class File:
    """The one parameter of a candidate that `configured` makes. config: path of a file that `from_config` reads."""

    config: str


def configured(path: Path) -> Candidate:
    """The pipeline of a configuration file, under its own name in lower case and hyphens.

    ParameterError or UnknownMethodError where the file is none, or where it has a profile or a gate, which choose by
    length what runs.
    """

    def build(given: File) -> Pipeline:
        made = from_config(given.config)
        if not isinstance(made, Pipeline):
            raise ParameterError(
                f"{given.config} has a profile or a gate, which make it several settings: leave them out"
            )
        return made

    name = re.sub("[^a-z0-9]+", "-", build(File(config=str(path))).name.lower()).strip("-")
    method = Method(name=name, summary=f"the pipeline of {path}", config=File, build=build)
    return Candidate(method, {"config": str(path)})


def in_eight_bits(candidate: Candidate) -> Candidate:
    """The candidate with an executor that computes tiles in 8 bits."""
    plain = candidate.method
    method = evolve(plain, build=lambda config: evolve(plain.build(config), executor=AutoExecutor(precision="int8")))
    return evolve(candidate, method=method)
