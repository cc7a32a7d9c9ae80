"""What `fit` and `tune` do: search length by length, write the profile, and report what was chosen and why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from sparseprefill.profiles.profile import Profile
from sparseprefill.registry import Registry, default_registry

from ..bench.clock import Clock
from ..calibration.candidates import Candidate
from ..calibration.fit import ModelReadings, break_even, described, figures, ranges, versions
from ..calibration.search import By, Search, Searcher, Trial
from ..calibration.target import Target
from ..evaluation.outcome import Summary
from ..table import Column, Table
from . import render
from .describe import DEFAULTS, told
from .files import unwritable
from .kept import Stop, wrote
from .results import COLUMNS, measured

if TYPE_CHECKING:
    from sparseprefill.breakeven.table import BreakEven
    from sparseprefill.profiles.identity import ModelIdentity

    from .progress import Bars
    from .setup import Place

FRONTIER = "The frontier: settings that no other beats in both cost and closeness to dense."
FAR = "The closest setting of each other method; over: its loss / what the target allows."
ON_CPU = "Settings are chosen by density, because times on a CPU differ from run to run; see --by."


def write(path: Path, profile: Profile) -> None:
    """The profile, whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(profile.to_json(), encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise unwritable("--output", path, error) from error
    wrote(path)


@frozen(slots=False)
class Shown:
    """A row: a trial of a search, or, without one, dense attention. over: whether its loss is shown."""

    search: Search
    trial: Trial | None
    over: bool = False

    @cached_property
    def summary(self) -> Summary:
        """Over the prompts that it has read."""
        return Summary.of(self.search.stock if self.trial is None else self.trial.outcomes, 0)

    @property
    def speed_up(self) -> str:
        """Over dense attention, on the same prompts."""
        dense = sum(one.seconds for one in self.search.stock[: self.summary.prompts])
        return f"{dense / self.summary.seconds:.2f}" if self.summary.seconds else ""

    @property
    def setting(self) -> str:
        """Or what stopped it."""
        return "" if self.trial is None else self.trial.error or _setting(self.trial)


def _table(rows: Sequence[Shown], title: str, *, tokens: bool = False) -> None:
    # What is tuned by answers samples too few rows for a recall.
    asked = any(row.summary.answers[1] for row in rows)
    heads = [head for head in COLUMNS if head not in ("end KL", "lowest", *(("recall", "rows") if asked else ()))]
    columns: list[Column[Shown]] = [
        Column("method", lambda row: "dense" if row.trial is None else row.trial.candidate.name),
        *([Column[Shown]("tokens", lambda row: f"{row.search.tokens:,}")] if tokens else []),
        Column("setting", lambda row: row.setting, words=True),
        *measured(lambda row: row.summary, heads),
        Column("speed-up", lambda row: row.speed_up),
        Column("prompts", lambda row: str(row.summary.prompts)),
        Column("over", lambda row: f"{row.trial.shortfall:.2f}" if row.over and row.trial is not None else ""),
    ]
    render.show(Table.of(columns, rows, lambda row: row.trial and row.trial.error, title=title, drop=DROP))


def chosen(searches: Sequence[Search], title: str, *, on_cpu: bool) -> None:
    """The choice of each length, and why there is none."""
    _table([Shown(one, one.chosen) for one in searches], title, tokens=True)
    for one in searches:
        if one.chosen is not None:
            render.line(lost(one))
    for one in searches:
        if one.chosen is None:
            near = one.nearest
            miss = "" if near is None else f"; the nearest was {near.candidate.name} ({_setting(near)}), {_times(near)}"
            render.line(f"{one.tokens:,} tokens: {one.reason}; calls of this length run dense{miss}")
        elif len(one.chosen.outcomes) < one.prompts:
            count = len(one.chosen.outcomes)
            render.line(f"{one.tokens:,} tokens: stopped early, chosen on {count} of {one.prompts} prompts")
        if one.untried:
            render.line(f"{one.tokens:,} tokens: there was no time for {one.untried} more settings")
    if on_cpu:
        render.line(ON_CPU, style="dim")


def frontier(search: Search) -> None:
    """What was seen at one length: the frontier, and the nearest of each method."""
    shown = search.frontier
    if shown:
        _table([Shown(search, one) for one in shown], f"{search.tokens:,} tokens. {FRONTIER}")
    far, seen = [], {one.candidate.name for one in shown}
    for name in dict.fromkeys(one.candidate.name for one in search.trials):
        mine = [one for one in search.trials if one.candidate.name == name]
        best = min(mine, key=lambda one: (bool(one.error), -len(one.outcomes), one.shortfall))
        far += [] if name in seen else [Shown(search, best, over=True)]
    if far:
        _table(far, f"{search.tokens:,} tokens. {FAR}")


def as_json(search: Search) -> dict[str, Any]:
    """Everything that was measured at one length."""
    best, near = search.chosen, search.nearest
    return {
        "tokens": search.tokens,
        "by": search.by,
        "prompts": search.prompts,
        "dense": figures(search.stock),
        "chosen": None if best is None else described(best),
        "reason": search.reason,
        "nearest": None if near is None else described(near),
        "frontier": [described(one) for one in search.frontier],
        "trials": [described(one) for one in search.trials],
        "untried": search.untried,
    }


DROP = ("prompts", "prefill", "rows", "recall", "99 %", "over", "density", "KL", "same", "tokens", "end")
"""Columns that a narrow terminal leaves out, in this order."""


def lost(search: Search) -> str:
    """What the choice of one length loses, in one sentence."""
    if search.chosen is None:
        return f"{search.tokens:,} tokens: dense loses nothing."
    facts = figures(search.chosen.outcomes)
    inside, end = facts["inside"], facts["end"]
    name = search.chosen.candidate.name
    words = (
        f"{search.tokens:,} tokens: in {1.0 - inside['agreement']:.1%} of the rows inside the prompt {name} prefers "
        f"another token than dense (KL {inside['kl']:.4f}, 99 % of the rows below {inside['high']:.3f}), in "
        f"{1.0 - end['agreement']:.1%} at its end"
    )
    for where, part in (("inside the prompt", inside), ("at its end", end)):
        if "asked" in part:
            words += f"; it gives {part['right']} of {part['asked']} answers {where}"
    return f"{words}."


def _setting(trial: Trial) -> str:
    one = trial.candidate
    layers = f"dense layers {', '.join(map(str, one.dense_layers))}" if one.dense_layers else ""
    return ", ".join(part for part in (told(one.parameters, "" if layers else DEFAULTS), layers) if part)


def _times(trial: Trial) -> str:
    return f"at {trial.shortfall:.1f} times what the target allows"


@define(eq=False, kw_only=True)
class Run:
    """A search for a profile, one length of prompts after the other; the file is whole after each of them.

    target, by: see `Searcher`. methods: that are searched. identity: of the model. how: what is told in the file.
    """

    target: Target
    by: By
    methods: Sequence[str]
    identity: ModelIdentity
    output: Path
    place: Place
    how: dict[str, Any]
    searches: list[Search] = field(factory=list, init=False)

    def over(
        self,
        lengths: Sequence[int],
        readings: Callable[[int], ModelReadings],
        candidates: Sequence[Candidate],
        until: float | None,
        shown: Bars,
        **more: Any,
    ) -> Stop:
        """Search at every length, and write the profile; Ctrl-C ends it, with what was found.

        until: when to stop, on the clock; each length gets its share of the time. more: options of `Searcher`.
        """
        self.how |= {"by": self.by, "settings": len(candidates)}
        self.how |= {"target": str(self.target), "device": str(self.place.device), "dtype": self.place.dtype_name}
        shown.expect(len(lengths))
        stop = Stop()
        for index, length in enumerate(lengths):
            now = time.monotonic()
            ends = None if until is None else now + (until - now) * length / sum(lengths[index:])
            searcher = Searcher(length, candidates, readings(length), self.target, self.by, until=ends, **more)
            stop = Stop()
            with stop, shown.contender(f"{length:,} tokens") as progress:
                self.searches.append(searcher.run(partial(progress, "settings")))
            if stop.heard:
                self.searches = [one for one in (*self.searches, searcher.result()) if one.trials]
                stop.check(len(self.searches))
            self.write()
            if stop.heard:
                break
        return stop

    def write(self, table: BreakEven | None = None) -> Profile:
        """The profile of what was found so far. table: times of what was chosen."""
        made = Profile(
            methods=tuple(self.methods),
            model=self.identity,
            ranges=ranges(self.searches),
            break_even=table,
            versions=versions(self.methods, default_registry()),
            tuned=self.how,
        )
        write(self.output, made)
        return made

    def time(self, shown: Bars) -> None:
        """Time what was chosen beside dense attention; the times go into the profile."""
        made, registry = ranges(self.searches), default_registry()
        if not any(one.method for one in made):
            return
        shown.expect(1)
        clock = Clock(self.place.device, 10, 1.0)
        with shown.contender("break-even") as progress:
            table, failed = break_even(
                made, self.identity, self.place.dtype_name, clock, registry, self.how["tail"], progress
            )
        self.how["not_timed"] = failed
        self.write(table)

    def report(self, registry: Registry, title: str, *, json: bool, whole: bool = False) -> None:
        """Print what was chosen and why, or all trials as JSON. whole: the frontiers too."""
        if json:
            searched = [as_json(one) for one in self.searches]
            facts = {"profile": str(self.output), **self.how, "model": self.identity.name, "searches": searched}
            render.write_json(facts)
        else:
            chosen(self.searches, title, on_cpu=self.place.device.type == "cpu")
            for one in self.searches if whole else ():
                frontier(one)
            for name, reason in self.how.get("left_out", {}).items():
                render.line(f"{name} is left out: {reason}")
            for name, reason in self.how.get("not_timed", {}).items():
                render.line(f"the profile has no break-even for {name} at {reason}")
            render.line(f'profile: {self.output}; use it with attach(model, profile="{self.output}")')
        render.broken(registry)
