"""What `demo` reports: the table, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import asdict

from sparseprefill import __version__

from ..demo.outcome import Outcome
from . import render

HEADS = ("method", "answers", "density", "recall", "lowest", "prefill", "ratio")
NOTES = (
    "answers: values right / asked, greedy, decoded with dense attention after each prefill. density: pairs computed / "
    "causal pairs, mean over layers. recall: attention mass kept, mean over layers, heads and {rows} sampled rows; "
    "lowest: the same for the head that keeps least. prefill: one forward pass over the text, nothing measured in it; "
    "ratio: to the stock model."
)
ON_CPU = (
    "On a CPU the methods run the plain PyTorch executor, which is made to be exact and not to be fast: "
    "compare the methods' times with each other."
)


def ratio(outcome: Outcome, stock: Outcome) -> float | None:
    """Prefill time over the stock model's."""
    return None if outcome.error or not stock.seconds else outcome.seconds / stock.seconds


def as_table(outcomes: Sequence[Outcome], title: str, rows: int, on_cpu: bool) -> None:
    """Print the table and what its columns mean."""
    lines = [_row(outcome, outcomes[0]) for outcome in outcomes if not outcome.error]
    render.table(HEADS, lines, right=HEADS[1:], title=title)
    for outcome in outcomes:
        if outcome.error:
            render.line(f"{outcome.contender.label} failed: {outcome.error}")
        for reason, layers in _dense_layers(outcome).items():
            render.line(f"{outcome.contender.label}: dense in layers {', '.join(map(str, layers))}: {reason}")
    render.line(NOTES.format(rows=rows) + (f" {ON_CPU}" if on_cpu else ""), style="dim")


def as_json(outcomes: Sequence[Outcome], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured."""
    return {"version": __version__, **settings, "outcomes": [_facts(outcome, outcomes[0]) for outcome in outcomes]}


def figures(outcome: Outcome) -> str:
    """Density and recall in a few words, for a picture."""
    return f"density {outcome.density:.1%}, recall {outcome.recall:.1%}"


def _row(outcome: Outcome, stock: Outcome) -> tuple[str, ...]:
    times = ratio(outcome, stock)
    return (
        outcome.contender.label,
        f"{outcome.right} / {outcome.asked}",
        f"{outcome.density:.1%}",
        f"{outcome.recall:.1%}",
        f"{outcome.lowest:.1%}",
        f"{outcome.seconds:.2f} s",
        "" if times is None else f"{times:.2f}",
    )


def _dense_layers(outcome: Outcome) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for layer in outcome.layers:
        if layer.reason:
            found.setdefault(layer.reason, []).append(layer.index)
    return found


def _facts(outcome: Outcome, stock: Outcome) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "method": outcome.contender.name,
        "parameters": dict(outcome.contender.parameters),
        "error": outcome.error or None,
    }
    if outcome.error:
        return facts
    return facts | {
        "tokens": outcome.tokens,
        "right": outcome.right,
        "asked": outcome.asked,
        "families": {name: {"right": right, "asked": asked} for name, (right, asked) in outcome.families.items()},
        "density": outcome.density,
        "recall": outcome.recall,
        "lowest_head_recall": outcome.lowest,
        "seconds": outcome.seconds,
        "ratio": ratio(outcome, stock),
        "layers": [asdict(layer) for layer in outcome.layers],
    }
