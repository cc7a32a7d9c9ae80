"""What `evaluate` reports: the table of scores, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict

from sparseprefill import __version__

from ..evaluation.scores import Run, Score
from ..table import Column, Table
from . import render

DROP = ("tokens", "items", "time", "stderr", "won", "density", "lost")
"""Columns that a narrow terminal leaves out, in this order."""
NOTES = (
    "score: the harness's, over all items; stderr: its standard error. lost, won: items that score lower and higher "
    "than with the stock model. density: pairs computed / causal pairs of the prefills. items: how many were asked; "
    "tokens: mean length of a prompt. time: for all items, decoding included."
)


def as_table(found: Sequence[Run], title: str) -> None:
    """Print the scores, what failed or ran dense, and what the columns mean."""
    stock = {(run.task, run.length): run for run in found if run.contender.pipeline is None}
    named = any(one.metric != str(run.length) for run in found for one in run.scores)
    rows = [(run, score) for run in found for score in run.scores]
    first = {one[0].title: one for one in reversed(rows)}

    def changed(one: tuple[Run, Score], which: int) -> str:
        changes = _changes(*one, stock.get((one[0].task, one[0].length)))
        return "" if changes is None else str(changes[which])

    columns: list[Column[tuple[Run, Score]]] = [
        Column("task", lambda one: one[0].title if first[one[0].title] is one else "", words=True),
        Column("method", lambda one: one[0].contender.label, words=True),
        *([Column[tuple[Run, Score]]("metric", lambda one: one[1].metric, words=True)] if named else []),
        Column("score", lambda one: f"{one[1].value:.4f}"),
        Column("stderr", lambda one: "" if one[1].stderr is None else f"{one[1].stderr:.4f}"),
        Column("lost", lambda one: changed(one, 0)),
        Column("won", lambda one: changed(one, 1)),
        Column("density", lambda one: _density(one[0])),
        Column("items", lambda one: f"{one[0].items:,}"),
        Column("tokens", lambda one: f"{one[0].tokens:,.0f}"),
        Column("time", lambda one: f"{one[0].seconds:.1f} s"),
    ]
    render.show(Table.of(columns, rows, title=title, remarks=remarks(found), notes=NOTES, drop=DROP))


def as_json(found: Sequence[Run], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured."""
    stock = {(run.task, run.length): run for run in found if run.contender.pipeline is None}
    return {
        "version": __version__,
        "lm_eval": _harness(),
        **facts,
        "runs": [_facts(run, stock.get((run.task, run.length))) for run in found],
    }


def remarks(found: Sequence[Run]) -> list[str]:
    """What stopped whom, whose prefill was not sparse and why, and what the harness warned of."""
    made: dict[str, list[str]] = {}
    for run in found:
        label = run.contender.label
        if run.error:
            made.setdefault(f"{label} failed: {run.error}", []).append(run.title)
        if (
            run.contender.pipeline is None
            and run.scores
            and all(one.value == 0 and one.higher_is_better for one in run.scores)
        ):
            made.setdefault(f"{label} scores 0, so a method has nothing to lose", []).append(run.title)
        if run.service is not None and run.service.doubt:
            made.setdefault(f"{label} {run.service.doubt}", []).append(run.title)
        for text, count in () if run.service is None else run.service.notes.items():
            made.setdefault(f"{label}: {text} ({count}x)", []).append(run.title)
        for text, count in run.warnings.items():
            made.setdefault(f"the harness warned, {count}x: {text}", []).append(run.title)
    return [f"{', '.join(dict.fromkeys(where))}: {what}" for what, where in made.items()]


def _density(run: Run) -> str:
    if run.service is None:
        return ""
    return "dense" if run.service.density is None else f"{run.service.density:.1%}"


def _changes(run: Run, score: Score, stock: Run | None) -> tuple[int, int] | None:
    if stock is None or stock is run:
        return None
    return next((score.beside(other) for other in stock.scores if other.metric == score.metric), None)


def _facts(run: Run, stock: Run | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "task": run.task,
        "length": run.length,
        "method": run.contender.name,
        "parameters": dict(run.contender.parameters),
        "error": run.error or None,
    }
    if run.error:
        return facts
    service = None
    if run.service is not None:
        service = {**asdict(run.service), "doubt": run.service.doubt}
    scores = []
    for score in run.scores:
        lost, won = _changes(run, score, stock) or (None, None)
        scores.append({**asdict(score), "lost": lost, "won": won})
    return facts | {
        "items": run.items,
        "tokens": run.tokens,
        "seconds": run.seconds,
        "scores": scores,
        "service": service,
        "warnings": dict(run.warnings),
    }


def _harness() -> str:
    from importlib.metadata import version

    return version("lm_eval")
