"""What `fit` and `tune` write and report: the profile, what was chosen and why, and what else there was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import frozen

from sparseprefill.profiles.profile import Profile

from ..calibration.fit import described, figures
from ..calibration.search import Search, Trial
from ..evaluation.outcome import Summary
from ..table import Column, Table
from . import render
from .describe import DEFAULTS, told
from .files import unwritable
from .kept import wrote
from .results import COLUMNS, measured

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


@frozen
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
    heads = [head for head in COLUMNS if head not in (("recall", "rows") if asked else ())]
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


DROP = (
    *("prompts", "end KL", "lowest", "prefill", "rows", "recall", "99 %", "over", "density", "KL", "same", "tokens"),
    "end",
)
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
