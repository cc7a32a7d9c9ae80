"""Searching, at one length of prompt, the cheapest candidate whose prefill stays near enough to dense.

SampleAttention tunes its thresholds so for one method (sections 4.4 and 5.3). Here candidates of any methods go through
successive halving (Jamieson and Talwalkar 2016, algorithm 1): all of them read one prompt, the better third reads more,
until the last read all. Nothing here knows a method, a model or a task: the caller brings `Readings`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Literal, Protocol, get_args

from attrs import define, evolve, field, frozen

from sparseprefill.errors import ParameterError
from sparseprefill.profiles.table import Steps
from sparseprefill.validate import maybe, number, one_of

from ..evaluation.outcome import Outcome, Summary
from .candidates import Candidate

Rows = Literal["all", "end"]
"""Rows in which limits hold."""
By = Literal["density", "seconds"]
FEWEST = 4
"""Candidates that reach the next rung at least."""
SHARES = (0.5, 0.8)
"""Shares of the time after which the first rungs must end; the others may take all."""
REPAIRED = 3
"""Candidates, at most one a method, for which layers are sought that should stay dense."""


@frozen(kw_only=True)
class Target:
    """Limits that a setting must keep, all that are given.

    agreement: least share of rows in which dense and sparse choose the same next token. kl: most nats of
    KL(dense || sparse) per row, on average. copies: least share of the restated tokens that dense gets right, where the
    model can copy and the prompts have such passages. recall: least attention mass kept, on average. rows: where the
    limits hold: `all`, in the rows of the whole prompt and at its end, each by itself; or `end`, at the end alone, for
    prompts that are read once and asked about behind their last row.

    Raises ParameterError for a number out of range, other rows, or where there is no limit at all.
    """

    agreement: float | None = field(default=None, validator=maybe(number(0.0, 1.0)))
    kl: float | None = field(default=None, validator=maybe(number(0.0)))
    copies: float | None = field(default=None, validator=maybe(number(0.0, 1.0)))
    recall: float | None = field(default=None, validator=maybe(number(0.0, 1.0)))
    rows: Rows = field(default="all", validator=one_of(*get_args(Rows)))

    def __attrs_post_init__(self) -> None:
        if all(one is None for one in (self.agreement, self.kl, self.copies, self.recall)):
            raise ParameterError("target is empty: pass agreement, kl, copies or recall")

    def shortfall(self, found: Sequence[Outcome]) -> float:
        """Loss as a multiple of the limit that is broken most: up to 1 the target is met.

        found: outcomes of a setting. Infinite where it failed, or loses something where nothing may be lost.
        """
        one = Summary.of(found, 0)
        if one.failed or not found:
            return math.inf
        everywhere = self.rows == "all"
        near = [one.inside, one.end] if everywhere else [one.end]
        lost = [0.0]
        if self.agreement is not None:
            lost += [_over(1.0 - (each.agreement if each else 0.0), 1.0 - self.agreement) for each in near]
        if self.kl is not None:
            lost += [_over(each.kl if each else math.inf, self.kl) for each in near]
        if self.copies is not None and one.copies.telling:
            lost.append(_over(1.0 - one.copies.kept, 1.0 - self.copies))
        if self.recall is not None:
            kept = min(one.recall, one.last_recall) if everywhere else one.last_recall
            lost.append(_over(1.0 - kept, 1.0 - self.recall))
        return max(lost)

    def __str__(self) -> str:
        words = {
            "agreement": "agreement of at least {}",
            "kl": "KL of at most {}",
            "copies": "copies of at least {}",
            "recall": "recall of at least {}",
        }
        given = {name: getattr(self, name) for name in words}
        limits = " and ".join(words[name].format(f"{value:g}") for name, value in given.items() if value is not None)
        return limits + ("" if self.rows == "all" else " at the prompt's end")


def _over(lost: float, allowed: float) -> float:
    """lost / allowed, where a rounding error of either counts as nothing; infinite for NaN."""
    if math.isnan(lost):
        return math.inf
    if lost <= allowed + 1e-9:
        return min(1.0, lost / allowed) if allowed > 0.0 and lost > 0.0 else 0.0
    return lost / allowed if allowed > 0.0 else math.inf


class Readings(Protocol):
    """The prompts of one length, and a model that reads them."""

    @property
    def count(self) -> int:
        """The number of prompts."""
        ...

    def stock(self, prompt: int) -> Outcome:
        """The outcome of the model's own attention on a prompt, by index; measured once."""
        ...

    def run(self, candidate: Candidate, prompt: int) -> Outcome:
        """The outcome of a candidate on it, an error of the library included."""
        ...


@frozen(eq=False)
class Trial:
    """A candidate, and what it did to the first prompts. shortfall: see `Target.shortfall`."""

    candidate: Candidate
    outcomes: tuple[Outcome, ...] = ()
    shortfall: float = math.inf

    @property
    def error(self) -> str:
        """The error that stopped it; empty where none did."""
        return next((one.error for one in self.outcomes if one.error), "")

    @property
    def density(self) -> float:
        """Pairs computed over causal pairs, averaged over the prompts."""
        return fmean(one.density for one in self.outcomes)

    def cost(self, by: By) -> float:
        """Density, or the seconds of a prefill, averaged over the prompts."""
        return self.density if by == "density" else fmean(one.seconds for one in self.outcomes)


@frozen(eq=False)
class Search:
    """The result of a search at one length.

    stock: outcomes of the model's own attention. chosen: the trial to keep, None where there is none, for the `reason`.
    untried: candidates for which the time did not suffice. prompts: that there were.
    """

    tokens: int
    prompts: int
    by: By
    stock: tuple[Outcome, ...]
    trials: tuple[Trial, ...]
    chosen: Trial | None
    reason: str
    untried: int

    @property
    def frontier(self) -> list[Trial]:
        """The trials of which none is both cheaper and nearer to dense, by growing cost; of those that read most."""
        best = math.inf
        found = []
        for one in sorted(_furthest(self.trials), key=lambda one: (one.cost(self.by), one.shortfall)):
            if one.shortfall < best:
                best = one.shortfall
                found.append(one)
        return found

    @property
    def cheaper(self) -> list[Trial]:
        """The trials that came through, and cost less than dense on the same prompts."""

        def dense(prompts: int) -> float:
            return 1.0 if self.by == "density" else fmean(one.seconds for one in self.stock[:prompts])

        return [one for one in self.trials if not one.error and one.cost(self.by) < dense(len(one.outcomes))]

    @property
    def nearest(self) -> Trial | None:
        """The trial that came nearest to dense, of those that cost less and read most."""
        return min(_furthest(self.cheaper), key=lambda one: one.shortfall, default=None)


@define(eq=False)
class Searcher:
    """One search, which may be stopped at any time: `result` makes the best of what there is.

    target: what must be kept. by: what should be little. until: when to stop, on the clock of `now`; None for no limit.
    rungs: prompts that the survivors of each rung have read, ascending; the last is all that count.
    """

    tokens: int
    candidates: Sequence[Candidate]
    readings: Readings
    target: Target
    by: By = "density"
    until: float | None = None
    now: Callable[[], float] = time.monotonic
    rungs: tuple[int, ...] = field(init=False)
    _trials: dict[Candidate, Trial] = field(factory=dict, init=False)
    _stock: list[Outcome] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        if not self.candidates:
            raise ParameterError("candidates is empty: pass one candidate or more")
        self.rungs = halving(self.readings.count)

    def run(self, progress: Steps = lambda done, of: None) -> Search:
        """Search to the end, or until the time is up. progress: hears of the candidates tried, and of how many."""
        count = len(self.candidates)

        def hear() -> None:
            progress(sum(one in self._trials for one in self.candidates), count)

        pending = list(self.candidates)
        while pending and (not self._trials or self._in_time()):
            self._bracket(pending, hear)  # one is enough, unless the time of its first rung ran out
            pending = [one for one in pending if one not in self._trials]
        self._last_resort()
        progress(count, count)
        return self.result()

    def _bracket(self, candidates: Sequence[Candidate], hear: Callable[[], None]) -> None:
        """All rungs, with as many candidates in the first as half of the time left suffices for."""
        began, left = self.now(), [Trial(one) for one in candidates]
        for index, prompts in enumerate(self.rungs):
            ends = self._ends(began, index)
            if index and not self._in_time():
                return
            self._stock += [self.readings.stock(index) for index in range(len(self._stock), prompts)]
            read: list[Trial] = []
            for one in left:
                if read and ends is not None and self.now() >= ends:
                    break
                hear()
                read.append(self._read(one, prompts))
            if index == 0:
                read += self._repaired(read, prompts, ends)
            left = self._survivors(read, prompts)

    def _in_time(self) -> bool:
        return self.until is None or self.now() < self.until

    def result(self) -> Search:
        """The best of what was measured so far."""
        trials = tuple(one for one in self._trials.values() if one.outcomes)
        found = Search(
            self.tokens, self.readings.count, self.by, tuple(self._stock), trials, None, "",
            untried=sum(1 for one in self.candidates if one not in self._trials),
        )  # fmt: skip
        good = [one for one in found.cheaper if one.shortfall <= 1.0]
        if good:  # one that was stopped before it had read all counts behind those that have
            return evolve(
                found, chosen=min(good, key=lambda one: (-len(one.outcomes), one.cost(self.by), one.shortfall))
            )
        reached = any(one.shortfall <= 1.0 for one in trials)
        why = "the settings that reach it cost no less than dense" if reached else "no setting reaches it"
        return evolve(found, reason=f"{self.target}: {why}" if trials else "nothing was measured")

    def _last_resort(self) -> None:
        """Let candidates that fell out on the way read on, cheapest first, if none of the last rung met the target."""
        count = self.rungs[-1]
        while self._in_time():
            good = [one for one in self.result().cheaper if one.shortfall <= 1.0]
            if not good or any(len(one.outcomes) == count for one in good):
                return
            self._read(min(good, key=lambda one: one.cost(self.by)), count)

    def _ends(self, began: float, rung: int) -> float | None:
        if self.until is None:
            return None
        last = rung == len(self.rungs) - 1
        return self.until if last or rung >= len(SHARES) else began + SHARES[rung] * (self.until - began)

    def _read(self, trial: Trial, prompts: int) -> Trial:
        """The trial on so many prompts; one that failed reads no more."""
        while len(trial.outcomes) < prompts and not trial.error:
            made = (*trial.outcomes, self.readings.run(trial.candidate, len(trial.outcomes)))
            shortfall = self.target.shortfall(made)
            trial = Trial(trial.candidate, made, shortfall)
            self._trials[trial.candidate] = trial
        return trial

    def _survivors(self, read: Sequence[Trial], prompts: int) -> list[Trial]:
        """The better third, those first that may reach the target: the fewer prompts, the more may still change."""
        slack = 1.0 + 1.0 / math.sqrt(prompts)

        def rank(one: Trial) -> tuple[bool, float]:
            plausible = one.shortfall <= slack
            return (not plausible, one.cost(self.by) if plausible else one.shortfall)

        reached = (one for one in self._trials.values() if one.shortfall <= 1.0)
        best = min((one.cost(self.by) for one in reached if len(one.outcomes) == self.rungs[-1]), default=math.inf)
        going = sorted((one for one in read if not one.error and one.cost(self.by) < best), key=rank)
        return going[: max(FEWEST, math.ceil(len(going) / 3))]

    def _repaired(self, read: Sequence[Trial], prompts: int, ends: float | None) -> list[Trial]:
        """Cheap candidates that miss the target, with as few of their worst layers dense as it takes to reach it."""
        good = min((one.cost(self.by) for one in read if one.shortfall <= 1.0), default=math.inf)
        missing = sorted(
            (one for one in read if not one.error and 1.0 < one.shortfall < math.inf), key=lambda one: one.cost(self.by)
        )
        made: list[Trial] = []
        names: set[str] = set()
        for one in missing:
            if len(names) == REPAIRED or one.cost(self.by) >= good or (ends is not None and self.now() >= ends):
                break
            if one.candidate.name not in names:
                names.add(one.candidate.name)
                made += self._with_dense_layers(one, prompts, ends)
        return made

    def _with_dense_layers(self, trial: Trial, prompts: int, ends: float | None) -> list[Trial]:
        """Bisects how many of the layers that keep least must stay dense."""
        worst = _worst_layers(trial.outcomes)
        fewest, most = 0, len(worst)  # fewest misses the target, all of them are dense attention
        made: list[Trial] = []
        while most - fewest > 1 and (ends is None or self.now() < ends):
            count = (fewest + most) // 2
            candidate = evolve(trial.candidate, dense_layers=tuple(sorted(worst[:count])))
            found = self._read(Trial(candidate), prompts)
            made.append(found)
            fewest, most = (fewest, count) if found.shortfall <= 1.0 else (count, most)
        return made


def halving(prompts: int) -> tuple[int, ...]:
    """Prompts of each rung: 1, 2, 4, ... and all."""
    if prompts < 1:
        raise ParameterError(f"prompts is {prompts}: pass one or more")
    return (*(1 << i for i in range(prompts.bit_length()) if 1 << i < prompts), prompts)


def _worst_layers(outcomes: Iterable[Outcome]) -> list[int]:
    """Layers that ran sparse, those first that keep the least attention, by the whole prompt or by its last rows."""
    kept: dict[int, list[float]] = {}
    for outcome in outcomes:
        for layer in outcome.layers:
            if not layer.reason:
                least = min(fmean(layer.recalls), fmean(layer.last or layer.recalls))
                kept.setdefault(layer.index, []).append(least)
    return sorted(kept, key=lambda index: fmean(kept[index]))


def _furthest(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that came through on the most prompts, as far as any did."""
    done = [one for one in trials if not one.error]
    most = max((len(one.outcomes) for one in done), default=0)
    return [one for one in done if len(one.outcomes) == most]
