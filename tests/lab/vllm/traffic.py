"""Requests that come over time at an engine in this process."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from attrs import define, field, frozen

from sparseprefill.errors import SparsePrefillError

from .engine import Engine

PAUSE = 0.002
"""Seconds that the loop sleeps at most where there is nothing to compute."""
_numbers = count()


@define(eq=False)
class Life:
    """One request. prompt: token ids. at: seconds from the start of the clock at which it comes.

    first, last: seconds at which its first and its latest token came out. tokens: of its answer. cached: tokens of the
    prompt found in the prefix cache.
    """

    prompt: Sequence[int]
    at: float = 0.0
    first: float | None = field(default=None, init=False)
    last: float = field(default=0.0, init=False)
    tokens: list[int] = field(factory=list, init=False)
    cached: int = field(default=0, init=False)
    finished: bool = field(default=False, init=False)

    @property
    def waited(self) -> float:
        """Seconds from its coming to its first token."""
        return (self.last if self.first is None else self.first) - self.at

    @property
    def pace(self) -> float | None:
        """Seconds of each token behind the first; None where there is none."""
        behind = len(self.tokens) - 1
        return (self.last - self.first) / behind if behind > 0 and self.first is not None else None

    def hear(self, output: Any, now: float) -> None:
        """One of vLLM's RequestOutputs came at this second."""
        self.tokens = [int(token) for token in output.outputs[0].token_ids]
        self.cached = max(self.cached, int(output.num_cached_tokens or 0))
        self.finished = bool(output.finished)
        if self.tokens:
            self.first = now if self.first is None else self.first
            self.last = now


@frozen(eq=False)
class Desk:
    """Hands requests to an engine and takes its answers, of `answer` tokens each, decoded greedily.

    clock: seconds. wish: what each request asks of the adapter, see `wishing`. lives: of the requests in the engine, by
    their id.
    """

    engine: Engine
    answer: int
    clock: Callable[[], float] = time.perf_counter
    wish: str | None = None
    lives: dict[str, Life] = field(factory=dict, init=False)

    def add(self, life: Life, answer: int | None = None) -> None:
        """Let a request come. answer: tokens, if other than the desk's."""
        from vllm import SamplingParams

        name = f"bench-{next(_numbers)}"
        tokens = {"max_tokens": answer or self.answer, "ignore_eos": True}
        sampling = SamplingParams(temperature=0, detokenize=False, extra_args=wishing(self.wish), **tokens)
        self.lives[name] = life
        self.engine.llm.llm_engine.add_request(name, {"prompt_token_ids": list(life.prompt)}, sampling)

    @property
    def busy(self) -> bool:
        """Whether the engine has a request that is not answered."""
        return bool(self.engine.llm.llm_engine.has_unfinished_requests())

    def step(self, began: float = 0.0) -> float:
        """One step of the engine; its seconds. began: the clock's time at second 0 of the lives."""
        start = self.clock()
        outputs = self.engine.llm.llm_engine.step()
        now = self.clock()
        for output in outputs:
            self.lives[str(output.request_id)].hear(output, now - began)
            if output.finished:
                del self.lives[str(output.request_id)]
        return now - start

    def drain(self) -> None:
        """Steps until nothing is left."""
        while self.busy:
            self.step()

    def serve(self, lives: Sequence[Life]) -> float:
        """Let requests come at their times, and answer all; seconds from the start to the last token.

        SparsePrefillError where one of them gets fewer tokens than it asked for.
        """
        waiting = deque(sorted(lives, key=lambda life: life.at))
        began = self.clock()
        while waiting or self.busy:
            while waiting and waiting[0].at <= self.clock() - began:
                self.add(waiting.popleft())
            if self.busy:
                self.step(began)
            else:
                time.sleep(min(PAUSE, max(0.0, waiting[0].at - (self.clock() - began))))
        short = [life for life in lives if not life.finished or len(life.tokens) != self.answer]
        if short:
            raise SparsePrefillError(f"{len(short)} of {len(lives)} requests got fewer than {self.answer} tokens")
        return max(life.last for life in lives)


def wishing(wish: str | None) -> dict[str, str] | None:
    """The ``extra_args`` of a request that asks for a profile of the adapter, or for "off"; None for no wish."""
    return None if wish is None else {"sparseprefill": wish}


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds at which requests come: of a Poisson process of `rate` a second that begins with a request at 0; with
    rate 0 all come at once. The same for a seed, and at another rate the same but for their pace."""
    source, now = random.Random(seed), 0.0
    while True:
        yield now
        with suppress(ZeroDivisionError):
            now += source.expovariate(1.0) / rate


def percentile(values: Sequence[float], share: float) -> float:
    """Of at least one value, with linear interpolation between two."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
