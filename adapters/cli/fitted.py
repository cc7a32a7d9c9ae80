"""What `fit` and `tune` write and report: the profile, what was chosen and why, and what else there was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparseprefill.profiles.profile import Profile

from ..calibration.fit import described, figures
from ..calibration.search import Search, Trial
from ..evaluation.outcome import Outcome
from . import render
from .describe import DEFAULTS, told
from .files import unwritable
from .kept import wrote

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


def chosen(searches: Sequence[Search], title: str, *, on_cpu: bool) -> None:
    """The choice of each length, and why there is none."""
    heads = ["method", "tokens", "setting", *_HEADS]
    rows = []
    for one in searches:
        if one.chosen is None:
            rows.append(["dense", f"{one.tokens:,}", "", *_figures(one.stock, one)])
        else:
            name = one.chosen.candidate.name
            rows.append([name, f"{one.tokens:,}", _setting(one.chosen), *_figures(one.chosen.outcomes, one)])
    _table(heads, rows, title)
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
    rows = [[one.candidate.name, _setting(one), *_figures(one.outcomes, search)] for one in shown]
    heads = ["method", "setting", *_HEADS]
    _table(heads, rows, f"{search.tokens:,} tokens. {FRONTIER}")
    far, seen = [], {one.candidate.name for one in shown}
    for name in dict.fromkeys(one.candidate.name for one in search.trials):
        if name in seen:
            continue
        mine = [one for one in search.trials if one.candidate.name == name]
        best = min(mine, key=lambda one: (bool(one.error), -len(one.outcomes), one.shortfall))
        figures_ = [""] * len(_HEADS) if best.error else _figures(best.outcomes, search)
        far.append([name, best.error or _setting(best), *figures_, "" if best.error else f"{best.shortfall:.2f}"])
    if far:
        _table([*heads, "over"], far, f"{search.tokens:,} tokens. {FAR}")


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
_HEADS = ("inside", "end", "KL", "99 %", "same", "recall", "rows", "density", "prefill", "speed-up", "prompts")


def _figures(outcomes: Sequence[Outcome], search: Search) -> list[str]:
    facts = figures(outcomes)
    inside, end = facts["inside"], facts["end"]
    dense = figures(search.stock[: facts["prompts"]])["seconds"]
    near = ["", "", ""]
    if "kl" in inside:
        near = [f"{inside['kl']:.4f}", f"{inside['high']:.3f}", f"{inside['agreement']:.1%}"]
    return [
        *(f"{part['right']} / {part['asked']}" if "asked" in part else "" for part in (inside, end)),
        *near,
        # What is tuned by answers samples too few rows for a recall.
        *("" if "asked" in end else f"{facts[name]:.1%}" for name in ("recall", "row_p1")),
        f"{facts['density']:.1%}",
        f"{facts['seconds']:.2f} s",
        f"{dense / facts['seconds']:.2f}" if facts["seconds"] else "",
        str(facts["prompts"]),
    ]


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


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    """A table without the columns that no row has anything in."""
    kept = [i for i, head in enumerate(heads) if head in ("setting", "method") or any(row[i] for row in rows)]
    shown = [[row[i] for i in kept] for row in rows]
    render.figures(title, [heads[i] for i in kept], shown, words=("setting",), drop=DROP)
