"""How measurements of a pretrained model are shown."""

from __future__ import annotations

from typing import Any

from attrs import asdict

from .measuring import Measured, Measuring
from .sheet import ON_CPU, Form, remarks

NOTES = (
    "first: a whole prompt in an empty cache, fresh: the same, each some tokens shorter than the one before, behind: "
    "new tokens behind cached ones; seconds to the first token, the median of {rounds}. load: {requests} prompts of "
    "{mixed} tokens in turns, {rate:g} a second (Poisson), {answer} tokens decoded each. inside: what the rows of a "
    "prompt say: tokens of restated passages and facts whose argmax is right, copies_nll and nll in nats, same: share "
    "of rows with the argmax of the first row of this table. end: facts asked behind the text. Steps of at most "
    "{budget} tokens."
)


def form(bench: Measuring, model: str) -> Form:
    """For the rows of a command."""
    notes = NOTES.format(
        rounds=bench.rounds,
        requests=bench.requests,
        mixed=", ".join(f"{tokens:,}" for tokens in bench.mixed) or "no",
        rate=bench.rate,
        answer=bench.answer,
        budget=bench.budget,
    )
    return Form(
        title=f"{model}, {bench.setup.shape.dtype}",
        heads=("backend", "what", "tokens", "cached", "figures", "dense calls", "extra GiB"),
        cells=_cells,
        fact=_fact,
        remarks=lambda row: remarks(f"{row.backend}, {row.what}", row),
        notes=lambda rows: notes + (ON_CPU if bench.device.type == "cpu" else ""),
    )


def _cells(row: Measured) -> tuple[str, ...]:
    if row.error:
        return (row.backend, "failed", *[""] * 5)
    said = (f"{name} {value:.4g}" for name, value in row.figures.items() if value is not None)
    extra = "" if row.extra is None else f"{row.extra / 2**30:.2f}"
    calls = str(sum(row.fallbacks.values()))
    return (row.backend, row.what, f"{row.tokens:,}", f"{row.cached:,}", ", ".join(said), calls, extra)


def _fact(row: Measured) -> dict[str, Any]:
    return {**asdict(row), "error": row.error or None}
