"""What `frontier` reports: a table for each length, JSON, Markdown, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict
from matplotlib.figure import Figure

from ..bench import facts
from ..calibration.frontier import Point, frontier
from . import render
from .bench_options import Files
from .bench_plot import MARKS, dress
from .describe import told
from .files import write
from .kept import wrote

if TYPE_CHECKING:
    from .setup import Place

COLUMNS = (
    *("method", "setting", "answers", "KL", "worst", "recall", "lowest", "density"),
    *("mask", "attention", "speed-up", "prefill speed-up", ""),
)
WORDS = ("method", "setting")
DROP = ("worst", "mask", "prefill speed-up", "attention", "recall", "lowest", "density", "KL", "answers")
"""Columns that a narrow terminal leaves out, in this order."""
BEST = "*"
NOTES = (
    "answers: right values / values asked. KL, worst: KL(dense || sparse) of the next token in nats, mean and largest. "
    "recall: share of the attention mass kept; lowest: lowest head recall. density: pairs computed / causal pairs. "
    "attention: ms for all layers, on the model's own queries and keys; mask: the part of it until the masks are "
    "there; speed-up: dense attention's time, measured beside the row, / this time. prefill speed-up: the same for the "
    "whole prefill, over the stock model. *: no other row has as many answers, as small a KL and as short a time, and "
    "is better in one of them."
)
NO_KL = 1e-7
"""Where the picture puts a KL of 0, in nats."""


def report(points: Sequence[Point], about: Mapping[str, Any], place: Place, files: Files) -> None:
    """Print the tables, and write what is wanted of them."""
    groups = [[one for one in points if one.tokens == tokens] for tokens in dict.fromkeys(one.tokens for one in points)]
    if files.plot is not None:
        draw(groups[-1], files.plot)
        wrote(files.plot)
    if files.markdown is not None:
        write("--markdown", files.markdown, "\n".join(map(markdown, groups)))
    if files.alone:
        render.write_json(_facts(points, about, place))
        return
    keep(points, about, place, files)
    for group in groups:
        render.figures(f"{_title(group)}, {place}", COLUMNS, _rows(group), _remarks(group), words=WORDS, drop=DROP)
    render.line(NOTES, style="dim")
    for path in (files.plot, files.markdown, files.json):
        if path is not None:
            render.line(f"written: {path}")


def keep(points: Sequence[Point], about: Mapping[str, Any], place: Place, files: Files) -> None:
    """Write the figures to the JSON file, should one be wanted: what a long run has is there if it is killed."""
    if files.json is not None and not files.alone:
        write("--json", files.json, render.to_json(_facts(points, about, place)) + "\n")


def _facts(points: Sequence[Point], about: Mapping[str, Any], place: Place) -> dict[str, Any]:
    return facts.about(place.device, **about, points=[as_json(one) for one in points])


def as_json(point: Point) -> dict[str, Any]:
    """Everything that was measured of one point; seconds."""
    one, near = point.summary, point.summary.divergence
    known: dict[str, Any] = {
        **{"tokens": point.tokens, "method": point.candidate.name, "setting": _setting(point)},
        **{"parameters": dict(point.candidate.parameters), "error": point.error or None},
    }
    if point.error:
        return known
    return known | {
        **{"right": one.answers[0], "asked": one.answers[1], "dense_right": point.stock.answers[0]},
        **{"kl": None if near is None else near.kl, "worst_kl": None if near is None else near.worst},
        **{"agreement": None if near is None else near.agreement, "recall": one.recall, "lowest": _least(point)},
        **{"density": one.density, "seconds": one.seconds, "prefill_speedup": point.prefill_speedup},
        "attention": None if point.time is None else {**asdict(point.time), "speedup": point.time.speedup},
        "untimed": point.untimed or None,
    }


def markdown(group: Sequence[Point]) -> str:
    """The table of one length."""
    heads = [*COLUMNS[:-1], "best"]
    lines = [f"### {_title(group)}", "", *[f"{text}." for text in _remarks(group)], ""]
    return "\n".join([*lines, *facts.grid(heads, _rows(group)), ""])


def draw(group: Sequence[Point], path: Path) -> None:
    """KL and lost answers by the speed-up of attention, a line for each method; nothing where no point came through."""
    done = [one for one in group if not one.error]
    if not done:
        return
    asked = done[0].stock.answers[1] > 0
    figure = Figure(figsize=(11.0 if asked else 6.5, 4.6), dpi=160, layout="constrained")
    axes = list(figure.subplots(1, 2 if asked else 1, squeeze=False).flat)
    for index, name in enumerate(dict.fromkeys(one.candidate.name for one in done)):
        own = sorted((one for one in done if one.candidate.name == name), key=lambda one: 1 / one.cost)
        style: dict[str, Any] = {"marker": MARKS[index % len(MARKS)], "color": f"C{index % 10}", "label": name}
        across = [1 / one.cost for one in own]
        axes[0].plot(across, [max(NO_KL, one.kl) for one in own], markersize=5, linewidth=1, **style)
        if asked:
            axes[1].plot(across, [_share(one) for one in own], markersize=5, linewidth=1, **style)
    timed = all(one.time is not None for one in done)
    labels = [(axes[0], "KL(dense || sparse), nats")] + ([(axes[1], "answers")] if asked else [])
    for axis, up in labels:
        dress(axis, up, "speed-up of attention" if timed else "1 / density")
    axes[0].set_yscale("log")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)


def _title(group: Sequence[Point]) -> str:
    return f"{group[0].tokens:,} tokens, {group[0].stock.answers[1]} values asked"


def _remarks(group: Sequence[Point]) -> list[str]:
    stock = group[0].stock
    times = [one.time for one in group if one.time is not None]
    made = [f"the model's own attention: {stock.answers[0]} / {stock.answers[1]} answers, {_prefill(group)}"]
    if group[0].pointless:
        made.append(
            "the model cannot do the task: its own attention has no right answer, so no row is marked and the answers "
            "compare nothing. Take a model that answers such questions, or shorter texts (--tokens)"
        )
    if times:
        span = sorted(one.dense * 1e3 for one in times)
        made.append(
            f"dense attention of all layers ({times[0].baseline}): {span[0]:.2f} to {span[-1]:.2f} ms beside the rows"
        )
    reasons = dict.fromkeys((one.candidate.name, one.untimed) for one in group if one.untimed)
    made += [f"{name}: attention alone is not timed: {reason}" for name, reason in reasons]
    made += [f"{name} has {told(shared)} in all rows" for name, shared in _common(group).items() if shared]
    return made + [f"{one.candidate.name} ({_setting(one)}) failed: {one.error}" for one in group if one.error]


def _prefill(group: Sequence[Point]) -> str:
    stock = group[0].stock
    return f"{stock.seconds / max(1, stock.prompts):.3f} s a prefill"


def _rows(group: Sequence[Point]) -> list[tuple[str, ...]]:
    best, common = frontier(group), _common(group)
    return [_row(one, common[one.candidate.name], any(one is other for other in best)) for one in group]


def _row(point: Point, common: Mapping[str, Any], best: bool) -> tuple[str, ...]:
    own = {name: value for name, value in point.candidate.parameters.items() if name not in common}
    name, one, near, time = point.candidate.name, point.summary, point.summary.divergence, point.time
    if point.error:
        return (name, told(own), "failed", *[""] * (len(COLUMNS) - 3))
    prefill = point.prefill_speedup
    return (
        *(name, told(own), f"{one.answers[0]} / {one.answers[1]}" if one.answers[1] else ""),
        *(("", "") if near is None else (f"{near.kl:.5f}", f"{near.worst:.4f}")),
        *(f"{one.recall:.1%}", f"{_least(point):.1%}", f"{one.density:.1%}"),
        *(
            ("", "", "")
            if time is None
            else (f"{time.estimate * 1e3:.2f}", f"{time.seconds * 1e3:.2f}", f"{time.speedup:.2f}")
        ),
        *("" if prefill is None else f"{prefill:.2f}", BEST if best else ""),
    )


def _least(point: Point) -> float:
    return min(point.summary.lowest, point.summary.last_lowest)


def _share(point: Point) -> float:
    right, asked = point.summary.answers
    return right / max(1, asked)


def _setting(point: Point) -> str:
    return told(point.candidate.parameters)


def _common(group: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """By method: the parameters that are the same in all of its rows, where there are several."""
    made = {}
    for name in dict.fromkeys(one.candidate.name for one in group):
        first, *others = (one.candidate.parameters for one in group if one.candidate.name == name)
        shared = {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}
        made[name] = shared if others else {}
    return made
