"""Steps in which every row decodes, and steps in which one prompt is read beside them: engines in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from attrs import define, field, frozen
from sparseprefill.adapters.cli.group import CommandError

from sparseprefill.profiles.table import Progress

from .engine import Setup, described, prompt
from .first_token import Contender
from .positions import Positions
from .traffic import Desk, Life, percentile

DECODE, MIXED = "decode", "with prefill"
WASTE = 128
"""Tokens that a request's last block of the KV cache may leave empty."""


@frozen(kw_only=True)
class Steps:
    """Steps of one kind in one engine. rows: that decode in each. rounds: seconds of each step, round by round.

    stock: the same of vLLM's own attention in the same rounds; None for itself, and for steps with prefill, whose
    attention is not the same work. fallbacks, slower: see `Loaded`.
    """

    backend: str
    kind: str = ""
    parameters: Mapping[str, Any] = field(factory=dict)
    rows: int = 0
    rounds: Sequence[Sequence[float]] = ()
    stock: Sequence[Sequence[float]] | None = None
    fallbacks: Mapping[str, int] = field(factory=dict)
    slower: Mapping[str, int] = field(factory=dict)
    error: str = ""

    @property
    def count(self) -> int:
        """How many steps were timed."""
        return sum(map(len, self.rounds))

    def at(self, share: float) -> float:
        """A percentile of the seconds of all steps."""
        return percentile([one for times in self.rounds for one in times], share)

    @property
    def whole(self) -> float:
        """Seconds of all steps of a round, the median of the rounds."""
        return percentile([sum(times) for times in self.rounds], 0.5)

    @property
    def ratios(self) -> list[float]:
        """Of each round: median seconds of a step over those of vLLM's own attention, lowest first."""
        if self.stock is None:
            return []
        return sorted(_median(mine) / _median(theirs) for mine, theirs in zip(self.rounds, self.stock, strict=True))


@define(kw_only=True)
class Decoding:
    """Times the steps of engines that all stand in memory at once, in turns, round by round; one round warms up.

    rows: requests that decode `answer` tokens each behind prompts of `tokens`. budget: tokens of a step. prefill:
    tokens of the prompt that is read beside all rows but one, 0 for no such steps.
    """

    setup: Setup
    structure: Positions
    rows: int = 256
    tokens: int = 64
    answer: int = 64
    budget: int = 2048
    prefill: int = 0
    rounds: int = 5

    def run(self, contenders: Sequence[Contender], progress: Progress = lambda what, done, of: None) -> Iterator[Steps]:
        """A row for each contender and kind of step; where an engine fails, one row with the error."""
        name = ""
        try:
            with ExitStack() as stack:
                desks = []
                for done, one in enumerate(contenders):
                    name = one.name
                    progress(f"starting {name}", done, len(contenders))
                    engine = stack.enter_context(self._engine(one))
                    if one.sparse is not None:
                        engine.check_backend()
                    desks.append(Desk(engine, self.answer))
                name = "engines"
                yield from self._kind(DECODE, contenders, desks, self._decode, progress)
                if self.prefill:
                    for desk in desks:
                        desk.engine.apply(self.structure.fit)
                    yield from self._kind(MIXED, contenders, desks, self._mixed, progress)
        except CommandError:
            raise
        except Exception as error:  # whatever vLLM raises
            yield Steps(backend=name, error=described(error))

    def _engine(self, contender: Contender) -> Any:
        longest = max(self.tokens, self.prefill) + self.answer
        return self.setup.engine(
            contender.sparse,
            longest=longest,
            kept=self.rows * (self.tokens + self.answer + WASTE) + longest,
            max_num_seqs=self.rows,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=False,
            enable_chunked_prefill=True,
        )

    def _kind(
        self,
        kind: str,
        contenders: Sequence[Contender],
        desks: Sequence[Desk],
        once: Callable[[Desk], list[float]],
        progress: Progress,
    ) -> Iterator[Steps]:
        for desk in desks:
            once(desk)
        before = [(desk.engine.fallbacks(), desk.engine.slower()) for desk in desks]
        rounds: list[list[list[float]]] = [[] for _ in desks]
        for number in range(self.rounds):
            progress(kind, number, self.rounds)
            order = list(zip(desks, rounds, strict=True))
            for desk, times in order if number % 2 == 0 else reversed(order):
                times.append(once(desk))
        stock = next((times for one, times in zip(contenders, rounds, strict=True) if one.sparse is None), None)
        for contender, desk, times, (dense, slower) in zip(contenders, desks, rounds, before, strict=True):
            yield Steps(
                backend=contender.name,
                kind=kind,
                parameters=contender.parameters,
                rows=self.rows if kind == DECODE else self.rows - 1,
                rounds=times,
                stock=None if contender.sparse is None or kind == MIXED else stock,
                fallbacks=dict(desk.engine.fallbacks() - dense),
                slower=dict(desk.engine.slower() - slower),
            )

    def _decode(self, desk: Desk) -> list[float]:
        """Seconds of the steps between the last request's first token and the first one's last token."""
        lives = self._begin(desk, self.rows)
        times = []
        while not any(life.finished for life in lives):
            times.append(desk.step())
        desk.drain()
        if len(times) < 2:
            raise CommandError("no step had all rows decoding; raise --tokens or --budget")
        return times[:-1]  # in the last one the first request was gone

    def _mixed(self, desk: Desk) -> list[float]:
        """Seconds of the steps from a prompt's coming to its first token, beside rows that decode."""
        lives = self._begin(desk, self.rows - 1)
        long = Life(prompt(self.prefill, self.setup.shape.vocabulary, self.setup.seed))
        desk.add(long, 1)
        times = []
        while not long.finished:
            times.append(desk.step())
        decoded = not any(life.finished for life in lives)
        desk.drain()
        if not decoded:
            raise CommandError("rows ended before the prompt beside them was read; raise --tokens or --budget")
        return times

    def _begin(self, desk: Desk, rows: int) -> list[Life]:
        """Requests that have their first token."""
        words, seed = self.setup.shape.vocabulary, self.setup.seed
        lives = [Life(prompt(self.tokens, words, seed + 1 + i)) for i in range(rows)]
        for life in lives:
            desk.add(life)
        while any(life.first is None for life in lives):
            desk.step()
        return lives


def _median(times: Sequence[float]) -> float:
    return percentile(times, 0.5)
