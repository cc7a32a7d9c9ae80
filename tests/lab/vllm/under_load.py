"""Requests that come over time: ours with every key, methods, and vLLM's own attention, engine by engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from sparseprefill.adapters.cli.group import CommandError

from sparseprefill.profiles.table import Progress

from .counters import pairs, tokens
from .engine import Engine, Setup, described
from .first_token import Contender, allocated
from .positions import Positions
from .shapes import Shape
from .traffic import Desk, Life, arrivals, percentile

SEQUENCES = 256
"""Requests that the engine has in work at a time, at most."""
WASTE = 128
"""Tokens that a request's last block of the KV cache may leave empty."""


@frozen(kw_only=True)
class Times:
    """Of all requests, in seconds: from coming to first token, each token behind the first, and of the whole run."""

    first_p50: float
    first_p99: float
    token_p50: float | None
    seconds: float

    @classmethod
    def of(cls, lives: Sequence[Life], seconds: float) -> Times:
        """lives: finished."""
        waits = [life.waited for life in lives]
        paces = [life.pace for life in lives if life.pace is not None]
        return cls(
            first_p50=percentile(waits, 0.5),
            first_p99=percentile(waits, 0.99),
            token_p50=percentile(paces, 0.5) if paces else None,
            seconds=seconds,
        )


@frozen(kw_only=True)
class Loaded:
    """One shape of requests at one engine.

    prompts: tokens of all prompts, of which `cached` were in the prefix cache; generated: of all answers. times: see
    `Times`; baseline: the same of the engine that the others are compared with. sparse: share of computed
    prompt tokens in chunks that ran the method. density: computed / causal pairs of one request of each length, alone.
    fallbacks: why calls ran dense while the clock ran, with counts; slower: which ran on a slower kernel, and why.
    extra: most bytes of PyTorch held while the clock ran beyond those before it, on GPUs.
    """

    backend: str
    parameters: Mapping[str, Any] = field(factory=dict)
    shape: str = ""
    requests: int = 0
    prompts: int = 0
    cached: int = 0
    generated: int = 0
    times: Times | None = None
    baseline: Times | None = None
    sparse: float | None = None
    density: float | None = None
    fallbacks: Mapping[str, int] = field(factory=dict)
    slower: Mapping[str, int] = field(factory=dict)
    extra: int | None = None
    error: str = ""

    @property
    def computed(self) -> int:
        """Tokens of prompts that were not cached."""
        return self.prompts - self.cached

    @property
    def speedups(self) -> dict[str, float | None]:
        """Over the baseline: of the time to first token, median and 99th percentile, and of a token behind it."""
        names = {"first": "first_p50", "first_p99": "first_p99", "token": "token_p50", "throughput": "seconds"}
        return {name: self._over(what) for name, what in names.items()}

    def _over(self, what: str) -> float | None:
        theirs, mine = getattr(self.baseline, what, None), getattr(self.times, what, None)
        return theirs / mine if theirs and mine else None


@define(kw_only=True)
class UnderLoad:
    """Serves every shape. rate: requests a second, 0 for all at once. requests: of each shape. answer: tokens of each.

    budget: tokens of a step. warm: requests that come at once before the clock runs, with other texts. baseline: name
    of the row that the others are compared with, which runs first.
    """

    setup: Setup
    structure: Positions
    shapes: Sequence[Shape]
    rate: float = 0.0
    requests: int = 16
    answer: int = 16
    budget: int = 8192
    warm: int = 4
    baseline: str = ""
    _base: dict[str, Times] = field(factory=dict, init=False)

    def run(self, contender: Contender, progress: Progress = lambda what, done, of: None) -> Iterator[Loaded]:
        """A row for each shape; where the engine fails, a last row with the error. Prefix caching is on for shapes with
        a prefix alone."""
        for cached in (False, True):
            shapes = [shape for shape in self.shapes if bool(shape.prefix) is cached]
            if not shapes:
                continue
            try:
                yield from self._rows(contender, shapes, cached, progress)
            except CommandError:
                raise
            except Exception as error:  # whatever vLLM raises: other engines may do
                yield Loaded(backend=contender.name, parameters=contender.parameters, error=described(error))

    def _rows(
        self, contender: Contender, shapes: Sequence[Shape], cached: bool, progress: Progress
    ) -> Iterator[Loaded]:
        progress("starting", 0, len(shapes))
        switches = {"enable_prefix_caching": cached, "enable_chunked_prefill": True}
        with self.setup.engine(contender.sparse, **self._sizes(shapes), **switches) as engine:
            if contender.sparse is not None:
                engine.check_backend()
            engine.apply(self.structure.fit)
            for done, shape in enumerate(shapes):
                progress(shape.text, done, len(shapes))
                row = self._row(engine, contender, shape)
                if contender.name == self.baseline and row.times is not None:
                    self._base[shape.text] = row.times
                yield evolve(row, baseline=self._base.get(shape.text))

    def _sizes(self, shapes: Sequence[Shape]) -> dict[str, Any]:
        """Of the engine. The KV cache holds all requests of a shape at once."""
        return {
            "longest": max(shape.longest for shape in shapes) + self.answer,
            "kept": max(shape.kept(max(self.requests, self.warm), self.answer + WASTE) for shape in shapes),
            "max_num_seqs": min(SEQUENCES, self.requests),
            "max_num_batched_tokens": self.budget,
        }

    def _row(self, engine: Engine, contender: Contender, shape: Shape) -> Loaded:
        desk = Desk(engine, self.answer)
        if shape.prefix:
            desk.serve([Life(shape.shared(self.setup.shape.vocabulary, self.setup.seed))])
        if self.warm:
            desk.serve([Life(ids) for ids in self._prompts(shape, self.warm, 1)])
        lives = self.lives(shape)
        before, calls = tokens() if contender.sparse else (0.0, 0.0), engine.fallbacks()
        slower = engine.slower()
        held = allocated(self.structure.device)
        seconds = desk.serve(lives)
        most = None if held is None else torch.cuda.max_memory_allocated(self.structure.device) - held
        return Loaded(
            backend=contender.name,
            parameters=contender.parameters,
            shape=shape.text,
            requests=len(lives),
            prompts=sum(len(life.prompt) for life in lives),
            cached=sum(life.cached for life in lives),
            generated=sum(len(life.tokens) for life in lives),
            times=Times.of(lives, seconds),
            sparse=sparse_share(engine, before),
            fallbacks=dict(engine.fallbacks() - calls),
            slower=dict(engine.slower() - slower),
            extra=most,
            density=self._density(engine, desk, shape),
        )

    def lives(self, shape: Shape) -> list[Life]:
        """The requests of a shape, not yet sent."""
        times = islice(arrivals(self.rate, self.setup.seed), self.requests)
        return [Life(ids, at) for ids, at in zip(self._prompts(shape, self.requests, 0), times, strict=True)]

    def _prompts(self, shape: Shape, requests: int, turn: int) -> list[list[int]]:
        return shape.prompts(requests, self.setup.shape.vocabulary, self.setup.seed, turn)

    def _density(self, engine: Engine, desk: Desk, shape: Shape) -> float | None:
        """Of more requests, one at a time, whose pairs are counted; None if no call ran sparse."""
        runtime = engine.runtime
        if runtime is None:
            return None
        before, runtime.tally.measure = pairs(), True
        try:
            for ids in self._prompts(shape, len(shape.lengths), 2):
                desk.serve([Life(ids)])
        finally:
            runtime.tally.measure = False
        computed, causal = (a - b for a, b in zip(pairs(), before, strict=True))
        return computed / causal if causal else None


def sparse_share(engine: Engine, before: tuple[float, float]) -> float | None:
    """Share of prompt tokens in chunks that ran sparse since `before` (see `tokens`); None where none were counted."""
    runtime = engine.runtime
    if runtime is None:
        return None
    runtime.settle()  # a last chunk that not all layers ran is counted with the next one otherwise
    sparse, every = (a - b for a, b in zip(tokens(), before, strict=True))
    return sparse / every if every else None
