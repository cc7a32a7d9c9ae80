"""How the times of steps are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict

from .decoding import DECODE, Decoding, Steps
from .sheet import ON_CPU, Form, remarks

NOTES = (
    "ms, p99: of one step of the engine, with its scheduling and sampling; median and 99th percentile of all rounds. "
    "steps: how many were timed, in {rounds} rounds in which the engines took turns. ratio: median of a round over "
    "that of {stock} in the same round, the median of the rounds; low and high are the extremes. Below 1 the step is "
    "faster."
)
MIXED = (
    " with prefill: the steps from the coming of one prompt of {prefill} tokens to its first token, of {budget} tokens "
    "at most; all ms: their sum. Prefill's attention runs on q and k of made-up heads there, chosen by position."
)
OWN = (
    " with prefill: the steps from the coming of one prompt of {prefill} tokens to its first token, of {budget} tokens "
    "at most; all ms: their sum."
)


def form(bench: Decoding) -> Form:
    """For the rows of a command."""
    shape = bench.setup.shape

    def notes(rows: Sequence[Steps]) -> str:
        text = NOTES + ((MIXED if bench.structure.heads else OWN) if bench.prefill else "")
        text = text.format(
            rounds=bench.rounds, stock=bench.setup.stock, prefill=f"{bench.prefill:,}", budget=f"{bench.budget:,}"
        )
        return text + (ON_CPU if bench.structure.device.type == "cpu" else "")

    return Form(
        title=f"steps that decode: {shape.layers} layers of width {shape.hidden}, {shape.dtype}, random weights",
        heads=("backend", "step", "rows", "steps", "ms", "p99", "all ms", "ratio", "low", "high"),
        cells=_cells,
        fact=_fact,
        remarks=lambda row: remarks(f"{row.backend}, {row.kind}", row),
        notes=notes,
    )


def _cells(row: Steps) -> tuple[str, ...]:
    if row.error:
        return (row.backend, "failed", *[""] * 8)
    times = tuple(f"{one * 1e3:.3f}" for one in (row.at(0.5), row.at(0.99)))
    whole = "" if row.kind == DECODE else f"{row.whole * 1e3:.1f}"
    ratios = tuple(f"{one:.3f}" for one in _ratios(row).values()) or ("", "", "")
    return (row.backend, row.kind, str(row.rows), str(row.count), *times, whole, *ratios)


def _fact(row: Steps) -> dict[str, Any]:
    names = ("backend", "kind", "parameters", "rows", "rounds", "fallbacks", "slower")
    found = {name: value for name, value in asdict(row).items() if name in names}
    if not row.error:
        found |= {"steps": row.count, "median": row.at(0.5), "p99": row.at(0.99), "whole": row.whole}
    return {**found, **(_ratios(row) or {"ratio": None}), "error": row.error or None}


def _ratios(row: Steps) -> dict[str, float]:
    ratios = row.ratios
    if not ratios:
        return {}
    middle = len(ratios) // 2
    median = ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    return {"ratio": median, "low": ratios[0], "high": ratios[-1]}
