"""A pretrained model in the engine: first tokens, a load and answers, profile by profile of one engine.

One engine of vLLM's own attention, and one with the adapter whose requests ask for each contender in turn, so that a
dozen contenders take two starts. Prompts are texts of the Python at hand, with passages and facts that are restated.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any

import torch
from attrs import define, field, frozen
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.evaluation.prompts import Prompt
from sparseprefill.adapters.evaluation.texts import built_in

from lab.inside import inside
from sparseprefill.profiles.table import Progress

from .counters import pairs
from .engine import Engine, Setup, described
from .first_token import allocated
from .traffic import Desk, Life, arrivals, wishing
from .under_load import WASTE, Times

OFF = "off"
"""What a request asks for to have vLLM's own attention in an engine with the adapter."""
SHORTER = 3
"""Tokens by which a prompt of the measurement `fresh` is shorter than the one before it."""
MEASURES = ("first", "fresh", "behind", "load", "inside", "end")


@frozen(kw_only=True)
class Measured:
    """One measurement. what: of `MEASURES`. tokens: of a prompt, of which `cached` were in the prefix cache.

    figures: what was measured, seconds or counts. fallbacks: why calls ran dense meanwhile, with counts; slower: which
    ran on a slower kernel, and why. extra: most bytes of PyTorch held beyond those before, on GPUs.
    """

    backend: str
    what: str = ""
    tokens: int = 0
    cached: int = 0
    figures: Mapping[str, float | int | None] = field(factory=dict)
    fallbacks: Mapping[str, int] = field(factory=dict)
    slower: Mapping[str, int] = field(factory=dict)
    extra: int | None = None
    error: str = ""


@define(kw_only=True)
class Measuring:
    """Measures every contender. tables: of `additional_config` by contender's name.

    lengths: tokens of prompts whose first token is timed. behind: pairs of tokens that are cached and new ones. mixed:
    lengths of the prompts of a load, in turns; rate, requests, answer, budget: see `UnderLoad`. texts: prompts of each
    length whose answers are looked at, of all kinds in turn. rounds: of which the median counts, after one that does
    not. measures: of `MEASURES`.
    """

    setup: Setup
    device: torch.device
    tokenizer: Any
    tables: Mapping[str, Mapping[str, Any]]
    lengths: Sequence[int]
    behind: Sequence[tuple[int, int]] = ()
    mixed: Sequence[int] = ()
    rate: float = 2.0
    requests: int = 24
    answer: int = 16
    budget: int = 8192
    texts: int = 4
    rounds: int = 3
    measures: Sequence[str] = MEASURES
    options: Mapping[str, Any] = field(factory=dict)
    _stock: dict[tuple[int, int], list[int]] = field(factory=dict, init=False)
    _made: dict[tuple[int, int], list[Prompt]] = field(factory=dict, init=False)

    def run(self, ours: bool, progress: Progress = lambda what, done, of: None) -> Iterator[Measured]:
        """The rows of one engine: vLLM's own, or with the adapter; a last row with the error where it fails."""
        names = [OFF, *self.tables] if ours else [self.setup.stock]
        at = names[0]
        try:
            progress("starting", 0, len(names))
            began = time.perf_counter()
            with self.setup.engine(self._table() if ours else None, **self._sizes(), **self.options) as engine:
                if ours:
                    engine.check_backend()
                yield Measured(backend=at, what=engine.described, figures={"seconds": time.perf_counter() - began})
                for done, at in enumerate(names):
                    for what in self.measures:
                        progress(f"{at}: {what}", done, len(names))
                        yield from getattr(self, f"_{what}")(engine, at, at if ours else None)
        except CommandError:
            raise
        except Exception as error:  # whatever vLLM raises: other engines may do
            yield Measured(backend=at, error=described(error))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max([*self.lengths, *(a + b for a, b in self.behind), *self.mixed])

    def _table(self) -> dict[str, Any]:
        """The first contender for requests that ask for nothing, and all as profiles."""
        return {**next(iter(self.tables.values())), "profiles": {name: dict(one) for name, one in self.tables.items()}}

    def _sizes(self) -> dict[str, Any]:
        one = self.longest + self.answer + WASTE
        load = sum(islice(self._turns(), self.requests)) + self.requests * (self.answer + WASTE) if self.mixed else 0
        steps = {"max_num_batched_tokens": self.budget, "max_num_seqs": max(16, self.requests)}
        switches = {"enable_prefix_caching": True, "enable_chunked_prefill": True}
        return {"longest": one, "kept": max(2 * one, load), **steps, **switches, "enforce_eager": False}

    def _turns(self) -> Iterator[int]:
        while True:
            yield from self.mixed

    def prompts(self, tokens: int, count: int) -> list[Prompt]:
        """So many texts, of all kinds in turn, made once."""
        found = self._made.get((tokens, count))
        if found is None:
            seed = self.setup.seed
            found = self._made[tokens, count] = [
                Prompt(one.name, one.ids[:tokens], _within(one.inside, tokens), _within(one.copies, tokens))
                for one in built_in(self.tokenizer, tokens, count, seed)
            ]
        return found

    def _first(self, engine: Engine, name: str, wish: str | None) -> Iterator[Measured]:
        for tokens in self.lengths:
            ids = self.prompts(tokens, self.texts)[0].ids
            yield self._timed(engine, "first", name, wish, [[ids]])

    def _fresh(self, engine: Engine, name: str, wish: str | None) -> Iterator[Measured]:
        """Each round some tokens shorter, so that no step before had the sizes of its last one."""
        for tokens in self.lengths:
            ids = self.prompts(tokens, self.texts)[0].ids
            shorter = [[ids[: len(ids) - SHORTER * number]] for number in range(self.rounds + 1)]
            yield self._timed(engine, "fresh", name, wish, shorter)

    def _behind(self, engine: Engine, name: str, wish: str | None) -> Iterator[Measured]:
        for cached, new in self.behind:
            ids = self.prompts(cached + new, self.texts)[0].ids
            yield self._timed(engine, "behind", name, wish, [[ids[:cached], ids]])

    def _timed(
        self, engine: Engine, what: str, name: str, wish: str | None, rounds: Sequence[Sequence[Sequence[int]]]
    ) -> Measured:
        """The prompts of a round one after the other in an empty cache; the last one's first token counts.

        rounds: in turn, one to warm up, and the first again at the end.
        """
        desk = Desk(engine, 1, wish=wish)
        found: list[Life] = []

        def once() -> None:
            empty(engine)
            lives = [Life(ids) for ids in rounds[len(found) % len(rounds)]]
            for life in lives:
                desk.serve([life])
            found.append(lives[-1])

        once()
        with _watched(self.device, engine, wish) as watch:
            for _ in range(self.rounds):
                once()
        seconds = [life.waited for life in found[1:]]
        figures = {"seconds": median(seconds), "fastest": min(seconds), "slowest": max(seconds)}
        return Measured(
            backend=name,
            what=what,
            tokens=len(rounds[0][-1]),
            cached=found[-1].cached,
            figures={**figures, "density": density(engine, once)},
            **watch.facts(),
        )

    def _load(self, engine: Engine, name: str, wish: str | None) -> Iterator[Measured]:
        if not self.mixed:
            return
        empty(engine)
        pool = self.prompts(max(self.mixed), self.requests)
        ids = [one.ids[:tokens] for one, tokens in zip(pool, self._turns(), strict=False)]
        desk = Desk(engine, self.answer, wish=wish)
        desk.serve([Life(one) for one in ids[: len(self.mixed)]])  # warms up
        empty(engine)
        times = islice(arrivals(self.rate, self.setup.seed), self.requests)
        lives = [Life(one, at) for one, at in zip(ids, times, strict=True)]
        with _watched(self.device, engine, wish) as watch:
            seconds = desk.serve(lives)
        found = Times.of(lives, seconds)
        figures = {"first_p50": found.first_p50, "first_p99": found.first_p99, "token_p50": found.token_p50}
        yield Measured(
            backend=name,
            what="load",
            tokens=sum(len(life.prompt) for life in lives),
            cached=sum(life.cached for life in lives),
            figures={**figures, "seconds": seconds, "requests": len(lives), "rate": self.rate},
            **watch.facts(),
        )

    def _inside(self, engine: Engine, name: str, wish: str | None) -> Iterator[Measured]:
        """What the rows of a prompt say: copies and facts that they find, and each token's log probability."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False, extra_args=wishing(wish)
        )
        for tokens in self.lengths:
            for number, prompt in enumerate(self.prompts(tokens, self.texts)):
                with _watched(self.device, engine, wish) as watch:
                    asked = [{"prompt_token_ids": list(prompt.ids)}]
                    said = engine.llm.generate(asked, sampling, use_tqdm=False)[0].prompt_logprobs[1:]
                chosen = [max(one, key=lambda token: one[token].logprob) for one in said]
                lost = [-float(one[token].logprob) for one, token in zip(said, prompt.ids[1:], strict=True)]
                theirs = self._stock.setdefault((tokens, number), chosen)
                yield Measured(
                    backend=name,
                    what=f"inside, {prompt.name}",
                    tokens=tokens,
                    figures=inside(prompt, chosen, lost, theirs),
                    **watch.facts(),
                )

    def _end(self, engine: Engine, name: str, wish: str | None) -> Iterator[Measured]:
        """Each fact asked behind the text that states it, one after the other in a warm cache: exact values."""
        for tokens in self.lengths:
            empty(engine)
            right = asked = cached = 0
            for prompt in self.prompts(tokens, self.texts):
                lives = [(Life(prompt.ids[: one.first]), prompt.ids[one.first : one.last]) for one in prompt.inside]
                for life, value in sorted(lives, key=lambda pair: len(pair[0].prompt)):
                    Desk(engine, len(value), wish=wish).serve([life])
                    right, asked = right + (tuple(life.tokens) == tuple(value)), asked + 1
                    cached += life.cached
            yield Measured(
                backend=name, what="end", tokens=tokens, cached=cached, figures={"facts": right, "of_facts": asked}
            )


def empty(engine: Engine) -> None:
    """Forget all that the prefix cache holds."""
    engine.llm.reset_prefix_cache()


def density(engine: Engine, act: Callable[[], Any]) -> float | None:
    """Computed / causal pairs of what runs sparse meanwhile; None if nothing does."""
    runtime = engine.runtime
    if runtime is None:
        return None
    tallies = [served.tally for served in runtime.every]
    before = pairs()
    for tally in tallies:
        tally.measure = True
    try:
        act()
    finally:
        for tally in tallies:
            tally.measure = False
    computed, causal = (a - b for a, b in zip(pairs(), before, strict=True))
    return computed / causal if causal else None


def _within(spans: Sequence[Any], tokens: int) -> tuple[Any, ...]:
    return tuple(one for one in spans if one.last <= tokens)


@define
class _watched:  # noqa: N801 - read as a statement
    """Counts what a block does. wish: whose calls."""

    device: torch.device
    engine: Engine
    wish: str | None
    held: int | None = None
    before: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})
    found: dict[str, Any] = field(factory=dict)

    def __enter__(self) -> _watched:
        self.before = self._counts()
        self.held = allocated(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        extra = None if self.held is None else torch.cuda.max_memory_allocated(self.device) - self.held
        fallbacks, slower = (
            {name: count - old.get(name, 0) for name, count in new.items() if count > old.get(name, 0)}
            for new, old in zip(self._counts(), self.before, strict=True)
        )
        self.found = {"fallbacks": fallbacks, "slower": slower, "extra": extra}

    def facts(self) -> dict[str, Any]:
        """Fields of `Measured`."""
        return self.found

    def _counts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        report = self.engine.report()
        found = report.get("profiles", {}).get(self.wish, {})
        kernels = {name: count for name, count in found.get("kernels", {}).items() if "(" in name}
        return dict(found.get("fallbacks", {})), kernels
