"""What the command reports: a table for each length, JSON, Markdown, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict
from matplotlib.figure import Figure
from sparseprefill.adapters.cli import render
from sparseprefill.adapters.cli.catalog import worded
from sparseprefill.adapters.cli.group import write
from sparseprefill.adapters.cli.picture import save
from sparseprefill.adapters.cli.render import Column, Table
from sparseprefill.adapters.cli.results import TOO_SHORT, cannot, measured
from sparseprefill.adapters.cli.results import right_of as of

from lab import files as written
from lab.bench import facts
from lab.bench.plot import MARKS, dress
from lab.bench.report import write_figures
from lab.files import Files

from .points import Point, frontier

if TYPE_CHECKING:
    from sparseprefill.adapters.cli.setup import Place
    from sparseprefill.adapters.evaluation.outcome import Divergence, Outcome, Summary

DROP = (
    *("mask", "end KL", "rows", "prefill speed-up", "99 %", "attention", "recall", "lowest", "density", "KL"),
    "end",
)
"""Columns that a narrow terminal leaves out, in this order."""
BEST = "*"
NOTES = (
    "inside: answers right / asked inside the prompt, which rows before its last ones must find; end: behind the "
    "prompt, where the dense tail helps. KL, 99 %: KL(dense || sparse) of the next token in nats over rows of the"
    " whole prompt, mean and 99th percentile; end KL: the mean "
    "at its end and behind it. recall: share of the attention mass kept; rows: 1st percentile of the sampled rows; "
    "lowest: lowest mean of a head. density: pairs computed / causal pairs. attention: ms for all layers, on the "
    "model's own queries and keys; mask: the part of it until the masks are there; speed-up: dense attention's time, "
    "measured beside the row, / this time. prefill speed-up: the same for the whole prefill, over the stock model. *: "
    "no other row has as many answers inside and behind the prompt, as small a KL and as short a time, and is better in"
    " one of them."
)
NO_KL = 1e-7
"""Where the picture puts a KL of 0, in nats."""


def report(points: Sequence[Point], about: Mapping[str, Any], place: Place, files: Files) -> None:
    """Print the tables, and write what is wanted of them."""
    groups = [[one for one in points if one.tokens == tokens] for tokens in dict.fromkeys(one.tokens for one in points)]
    if files.plot is not None:
        draw(groups[-1], files.plot)
    if files.markdown is not None:
        write("--markdown", files.markdown, "\n".join(markdown(one) for one in groups))
    if files.alone:
        render.write_json(_facts(points, about, place))
        return
    keep(points, about, place, files)
    for group in groups:
        render.show(table(group, f", {place}"))
    render.line(NOTES, style="dim")
    for path in (files.plot, files.markdown, files.json):
        if path is not None:
            render.line(f"written: {path}")


def keep(points: Sequence[Point], about: Mapping[str, Any], place: Place, files: Files) -> None:
    """Write the figures to the JSON file, should one be wanted: what a long run has is there if it is killed."""
    if files.json is not None and not files.alone:
        write_figures(files.json, _facts(points, about, place))


def _facts(points: Sequence[Point], about: Mapping[str, Any], place: Place) -> dict[str, Any]:
    return facts.about(place.device, **about, points=[as_json(one) for one in points])


def as_json(point: Point) -> dict[str, Any]:
    """Everything that was measured of one point; seconds."""
    one, stock = point.summary, point.stock
    known: dict[str, Any] = {
        **{"tokens": point.tokens, "method": point.candidate.name, "setting": _setting(point)},
        **{"parameters": dict(point.candidate.parameters), "error": point.error or None},
    }
    if point.error:
        return known
    return known | {
        "inside": _near(one.inside, one.answers_inside, stock.answers_inside),
        "end": _near(one.end, one.answers, stock.answers),
        "copies": _copies(one, stock),
        "prompts": [_each(*pair) for pair in zip(one.each, stock.each, strict=True)],
        **{"recall": one.recall, "row_p1": one.row_p1, "row_lowest": one.row_lowest, "lowest": _least(point)},
        **{"density": one.density, "seconds": one.seconds, "prefill_speedup": point.prefill_speedup},
        "attention": None if point.time is None else {**asdict(point.time), "speedup": point.time.speedup},
        "untimed": point.untimed or None,
    }


def _near(found: Divergence | None, answers: tuple[int, int], dense: tuple[int, int]) -> dict[str, Any]:
    return {
        **{"right": answers[0], "asked": answers[1], "dense_right": dense[0]},
        **({} if found is None else found.figures),
    }


def _copies(one: Summary, stock: Summary) -> dict[str, Any] | None:
    if not one.copies.asked:
        return None
    return {
        **{"right": one.copies.right, "asked": one.copies.asked, "dense_right": stock.copies.right},
        **{"nll": one.copies.nll, "dense_nll": stock.copies.nll},
    }


def _each(one: Outcome, stock: Outcome) -> dict[str, Any]:
    """What intervals are made of: one prompt beside dense's."""
    inside = one.fidelity and one.fidelity.inside
    return {
        **{"prompt": one.prompt, "tokens": one.tokens, "density": one.density, "seconds": one.seconds},
        **{"dense_seconds": stock.seconds, "kl": inside and inside.kl, "nll_ratio": inside and inside.nll_ratio},
        **{"facts": one.inside_score[0], "dense_facts": stock.inside_score[0]},
        **{"copies": one.copies and one.copies.right, "dense_copies": stock.copies and stock.copies.right},
    }


def table(group: Sequence[Point], where: str = "") -> Table:
    """The points of one length. where: ends the title."""
    best, common = frontier(group), _common(group)

    def setting(one: Point) -> str:
        shared = common[one.candidate.name]
        return worded({name: value for name, value in one.candidate.parameters.items() if name not in shared})

    columns: list[Column[Point]] = [
        Column("method", lambda one: one.candidate.name, words=True),
        Column("setting", setting, words=True),
        *measured(lambda one: one.summary, without=("same", "prefill")),
        Column("mask", lambda one: "" if one.time is None else f"{one.time.estimate * 1e3:.2f}"),
        Column("attention", lambda one: "" if one.time is None else f"{one.time.seconds * 1e3:.2f}"),
        Column("speed-up", lambda one: "" if one.time is None else f"{one.time.speedup:.2f}"),
        Column("prefill speed-up", lambda one: "" if one.prefill_speedup is None else f"{one.prefill_speedup:.2f}"),
        Column("", lambda one: BEST if any(one is other for other in best) else ""),
    ]
    title = f"{_title(group)}{where}"
    return Table.of(columns, group, lambda one: one.error, title=title, drop=DROP, remarks=_remarks(group))


def markdown(group: Sequence[Point]) -> str:
    """The table of one length."""
    return written.markdown(table(group), {"": "best"})


def draw(group: Sequence[Point], path: Path) -> None:
    """KL and lost answers by the speed-up of attention, a line for each method; nothing where no point came through."""
    done = [one for one in group if not one.error]
    if not done:
        return
    asked = done[0].stock.answers_inside[1] > 0
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
    labels = [(axes[0], "KL(dense || sparse), all rows, nats")] + (
        [(axes[1], "answers inside the prompt")] if asked else []
    )
    for axis, up in labels:
        dress(axis, up, "speed-up of attention" if timed else "1 / density")
    axes[0].set_yscale("log")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8, frameon=False)
    save(figure, "--plot", path)


def _title(group: Sequence[Point]) -> str:
    stock = group[0].stock
    asked = " and ".join(f"{pair[1]} {what}" for pair, what in _scores(stock) if pair[1])
    return f"{group[0].tokens:,} tokens, {asked or 'nothing asked'}, {stock.prompts} texts"


def _scores(stock: Summary) -> list[tuple[tuple[int, int], str]]:
    copies = stock.copies
    return [
        ((copies.right, copies.asked), "restated tokens"),
        (stock.answers_inside, "answers inside"),
        (stock.answers, "at the end"),
    ]


def _remarks(group: Sequence[Point]) -> list[str]:
    stock = group[0].stock
    times = [one.time for one in group if one.time is not None]
    scores = ", ".join(f"{of(pair)} {what}" for pair, what in _scores(stock) if pair[1])
    made = [f"the model's own attention: {scores}, {_prefill(group)}", *cannot([stock])]
    if not (stock.answers_inside[1] or stock.copies.asked):
        made.append(TOO_SHORT)
    if times:
        span = sorted(one.dense * 1e3 for one in times)
        made.append(
            f"dense attention of all layers ({times[0].baseline}): {span[0]:.2f} to {span[-1]:.2f} ms beside the rows"
        )
    reasons = dict.fromkeys((one.candidate.name, one.untimed) for one in group if one.untimed)
    made += [f"{name}: attention alone is not timed: {reason}" for name, reason in reasons]
    made += [f"{name} has {worded(shared)} in all rows" for name, shared in _common(group).items() if shared]
    return made + [f"{one.candidate.name} ({_setting(one)}) failed: {one.error}" for one in group if one.error]


def _prefill(group: Sequence[Point]) -> str:
    stock = group[0].stock
    return f"{stock.seconds / max(1, stock.prompts):.3f} s a prefill"


def _least(point: Point) -> float:
    return min(point.summary.lowest, point.summary.last_lowest)


def _share(point: Point) -> float:
    right, asked = point.summary.answers_inside
    return right / max(1, asked)


def _setting(point: Point) -> str:
    return worded(point.candidate.parameters)


def _common(group: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """By method: the parameters that are the same in all of its rows, where there are several."""
    made = {}
    for name in dict.fromkeys(one.candidate.name for one in group):
        first, *others = (one.candidate.parameters for one in group if one.candidate.name == name)
        shared = {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}
        made[name] = shared if others else {}
    return made
