"""Shared parts of commands that try many settings: methods with their tables, the search for a profile, its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from sparseprefill import structure
from sparseprefill.breakeven.table import BreakEven
from sparseprefill.errors import SparsePrefillError
from sparseprefill.method import Method
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import Profile
from sparseprefill.registry import default_registry

from ..calibration.candidates import Candidate
from ..calibration.fit import break_even, described, figures, ranges, versions
from ..calibration.measure import Clock
from ..calibration.search import By, Readings, Search, Searcher, Target, Trial
from ..evaluation.outcome import Summary
from ..evaluation.prompts import Prompt
from . import render
from .catalog import DEFAULTS, worded
from .group import Stop, write
from .options import changes, floored, suited
from .progress import Bars
from .render import Column, Table
from .results import measured
from .setup import Place

SAMPLED = 4096
"""Tokens of the prompts that tables are made from, at most."""
FRONTIER = "The frontier: settings that no other beats in both cost and closeness to dense."
ON_CPU = "Settings are chosen by density, because times on a CPU differ from run to run; see --by."
DROP = ("prompts", "prefill", "rows", "recall", "99 %", "density", "KL", "same", "tokens", "end")
"""Columns that a narrow terminal leaves out, in this order."""
Shown = tuple[Search, Trial | None]
"""A row: a trial of a search, or, without one, dense attention."""


def fixed_parameters(
    methods: Sequence[Method],
    given: Sequence[str],
    model: str | None,
    floor: Any,
    tried: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Parameters by method that every setting has: those of --set, the floor, and what suits the embedded model.

    tried: values of --try, by method, which are not fixed.
    """
    usual, changed = suited(model), changes([one.name for one in methods], given)
    made: dict[str, dict[str, Any]] = {}
    for one in methods:
        suiting = {name: value for name, value in usual.get(one.name, {}).items() if name not in one.search}
        own = {**suiting, **floored(one.name, floor), **changed[one.name]}
        own = {name: value for name, value in own.items() if name not in tried[one.name]}
        path = None if one.table is None else own.get(one.table.parameter)
        if one.table is not None and isinstance(path, str) and Path(path).is_file():
            # A profile is one file: tables go into it.
            own[one.table.parameter] = structure.unstructure(one.table.read(path))
        made[one.name] = own
    return made


def without_tables(methods: Sequence[Method], fixed: Mapping[str, Mapping[str, Any]]) -> list[Method]:
    """Methods that need no table of the model, or are given one: they can be checked before it is loaded."""
    return [one for one in methods if one.table is None or one.table.parameter in fixed[one.name]]


def with_tables(
    methods: list[Method],
    fixed: dict[str, dict[str, Any]],
    model: Any,
    identity: ModelIdentity,
    prompts: Sequence[Prompt],
    shown: Bars,
) -> tuple[list[Method], dict[str, str]]:
    """The methods, those that need a table of this model with one made on the prompts; or without them, and why."""
    from ..huggingface.reader import Reader

    left_out: dict[str, str] = {}
    length = min(SAMPLED, *(len(one.ids) for one in prompts))
    samples = [one.ids[:length] for one in prompts]
    for name, table in ((one.name, one.table) for one in methods):
        if table is None or table.parameter in fixed[name]:
            continue
        if table.lacking:
            left_out[name] = f"it needs a table of {table.parameter}, and making one needs {table.lacking}"
            continue
        try:
            with shown.contender(f"the table of {name}") as progress:
                made = table.make(Reader(model, identity), samples, table.settings(), progress)
        except SparsePrefillError as error:
            left_out[name] = f"its {table.parameter} cannot be made: {error}"
            continue
        fixed[name][table.parameter] = structure.unstructure(made.table)
        if made.useless:
            left_out[name] = made.useless
    return [one for one in methods if one.name not in left_out], left_out


@define(eq=False, kw_only=True)
class Run:
    """A search for a profile, one length of prompts after the other; the file is whole after each of them.

    target, by: see `Searcher`. methods: that are searched. identity: of the model. how: what is told in the file.
    dense_below: tokens below which calls run dense whatever was found.
    """

    target: Target
    by: By
    methods: Sequence[str]
    identity: ModelIdentity
    output: Path
    place: Place
    how: dict[str, Any]
    dense_below: int = 0
    searches: list[Search] = field(factory=list, init=False)

    def over(
        self,
        lengths: Sequence[int],
        readings: Callable[[int], Readings],
        candidates: Sequence[Candidate],
        until: float,
        shown: Bars,
    ) -> Stop:
        """Search at every length, and write the profile; Ctrl-C ends it, with what was found.

        readings: of a length, made when its turn comes. until: when all must end, by `time.monotonic`; each length gets
        its share of the time.
        """
        stop = Stop()
        for index, length in enumerate(lengths):
            now = time.monotonic()
            ends = now + (until - now) * length / sum(lengths[index:])
            searcher = Searcher(length, candidates, readings(length), self.target, self.by, until=ends)
            with stop:
                searcher.run(shown.settings(f"{length:,} tokens"))
            found = searcher.result()
            if found.trials or not stop.heard:
                self.searches.append(found)
            stop.check(len(self.searches))
            self.write()
            if stop.heard:
                break
        return stop

    def write(self, table: BreakEven | None = None) -> None:
        """Write the profile of what was found so far, whole or not at all. table: times of what was chosen."""
        made = Profile(
            methods=tuple(self.methods),
            model=self.identity,
            ranges=ranges(self.searches, self.dense_below),
            break_even=table,
            versions=versions(self.methods, default_registry()),
            tuned=self.how,
        )
        write("--output", self.output, made.to_json())

    def time(self, shown: Bars) -> None:
        """Time what was chosen beside dense attention; the times go into the profile."""
        made, clock = ranges(self.searches), Clock(self.place.device, 10, 1.0)
        if not any(one.method for one in made):
            return
        shown.expect(1)
        with shown.contender("break-even") as progress:
            table, self.how["not_timed"] = break_even(
                made, self.identity, self.place.dtype_name, clock, default_registry(), self.how["tail"], progress
            )
        self.write(table)

    def report(self, title: str, stop: Stop, of: int, *, json: bool) -> None:
        """Print what was chosen and why, or all trials as JSON, and end the command if a signal came.

        of: lengths of a whole run.
        """
        if json:
            searched = [as_json(one) for one in self.searches]
            facts = {"profile": str(self.output), **self.how, "model": self.identity.name, "searches": searched}
            render.write_json(facts)
        else:
            show([(one, one.chosen) for one in self.searches], title, tokens=True)
            for text in (*map(_lost, self.searches), *(text for one in self.searches for text in _missed(one))):
                render.line(text)
            if self.place.device.type == "cpu":
                render.line(ON_CPU, style="dim")
            for one in self.searches:
                if one.frontier:
                    show([(one, trial) for trial in one.frontier], f"{one.tokens:,} tokens. {FRONTIER}")
            for name, reason in self.how.get("left_out", {}).items():
                render.line(f"{name} is left out: {reason}")
            for name, reason in self.how.get("not_timed", {}).items():
                render.line(f"the profile has no break-even for {name} at {reason}")
            render.line(f'profile: {self.output}; use it with attach(model, profile="{self.output}")', whole=True)
        render.broken(default_registry())
        stop.end(len(self.searches), of, "lengths")


def as_json(search: Search) -> dict[str, Any]:
    """Everything that was measured at one length."""
    best, near = search.chosen, search.nearest
    return {
        **{"tokens": search.tokens, "by": search.by, "prompts": search.prompts},
        "dense": figures(search.stock),
        "chosen": best and described(best),
        "reason": search.reason,
        "nearest": near and described(near),
        "frontier": [described(one) for one in search.frontier],
        "trials": [described(one) for one in search.trials],
        "untried": search.untried,
    }


def show(rows: Sequence[Shown], title: str, *, tokens: bool = False) -> None:
    """Print a table of trials. tokens: of which length they are."""
    summaries = {id(row): Summary.of(row[0].stock if row[1] is None else row[1].outcomes, 0) for row in rows}

    def summary(row: Shown) -> Summary:
        return summaries[id(row)]

    def speed_up(row: Shown) -> str:
        dense = sum(one.seconds for one in row[0].stock[: summary(row).prompts])
        return f"{dense / summary(row).seconds:.2f}" if summary(row).seconds else ""

    columns: list[Column[Shown]] = [
        Column("method", lambda row: "dense" if row[1] is None else row[1].candidate.name),
        *([Column[Shown]("tokens", lambda row: f"{row[0].tokens:,}")] if tokens else []),
        Column("setting", lambda row: "" if row[1] is None else row[1].error or setting(row[1]), words=True),
        *measured(summary, without=("end KL", "lowest")),
        Column("speed-up", speed_up),
        Column("prompts", lambda row: str(summary(row).prompts)),
    ]
    render.show(Table.of(columns, rows, lambda row: row[1] and row[1].error, title=title, drop=DROP))


def _lost(search: Search) -> str:
    """The loss of one length's choice, in one sentence."""
    if search.chosen is None:
        return f"{search.tokens:,} tokens: dense loses nothing."
    facts = figures(search.chosen.outcomes)
    inside, end = facts["inside"], facts["end"]
    name = search.chosen.candidate.name
    return (
        f"{search.tokens:,} tokens: in {1.0 - inside['agreement']:.1%} of the rows inside the prompt {name} prefers "
        f"another token than dense (KL {inside['kl']:.4f}, 99 % of the rows below {inside['high']:.3f}), in "
        f"{1.0 - end['agreement']:.1%} at its end."
    )


def _missed(search: Search) -> list[str]:
    """Reasons for which one length has no choice, or one that was made early, and settings that were not tried."""
    made, where, near = [], f"{search.tokens:,} tokens:", search.nearest
    if search.chosen is None:
        miss = f"{where} {search.reason}; calls of this length run dense"
        if near is not None:
            miss += f"; the nearest was {named(near)}, at {near.shortfall:.1f} times what the target allows"
        made.append(miss)
    elif len(search.chosen.outcomes) < search.prompts:
        made.append(f"{where} stopped early, chosen on {len(search.chosen.outcomes)} of {search.prompts} prompts")
    if search.untried:
        made.append(f"{where} there was no time for {search.untried} more settings")
    return made


def named(trial: Trial) -> str:
    """Method and setting of a trial, in words."""
    return f"{trial.candidate.name} ({setting(trial)})"


def setting(trial: Trial) -> str:
    """Parameters and dense layers of a trial, in words."""
    one = trial.candidate
    layers = f"dense layers {', '.join(map(str, one.dense_layers))}" if one.dense_layers else ""
    return ", ".join(part for part in (worded(one.parameters, "" if layers else DEFAULTS), layers) if part)
