"""How answers under load are shown."""

from __future__ import annotations

import torch
from attrs import asdict

from .answering import Answered, Answering
from .sheet import ON_CPU, Form, or_empty, remarks

NOTES = (
    "{requests} requests {rate}, steps of at most {budget} tokens. right: values of the answers that are right, of "
    "those asked. stock: the same of {stock}. same: requests with the very tokens of {stock}. first p50, p99: "
    "milliseconds from a request's coming to its first token. method: share of the prompts' tokens in chunks that ran "
    "the method. dense calls: those that fell back, of all layers."
)


def form(bench: Answering, model: str, device: torch.device) -> Form:
    """For the rows of a command."""
    notes = NOTES.format(
        requests=len(bench.tasks),
        rate=f"at {bench.rate:g} a second (Poisson)" if bench.rate else "at once",
        budget=bench.budget,
        stock=bench.setup.stock,
    )
    return Form(
        title=f"needle questions under load: {model}, {bench.setup.shape.dtype}",
        heads=("backend", "right", "stock", "same", "first p50", "first p99", "method", "dense calls"),
        cells=_cells,
        fact=lambda row: {**asdict(row), "error": row.error or None},
        remarks=lambda row: remarks(row.backend, row),
        notes=lambda rows: notes + (ON_CPU if device.type == "cpu" else ""),
    )


def _cells(row: Answered) -> tuple[str, ...]:
    if row.error or row.times is None:
        return (row.backend, "failed", *[""] * 6)
    return (
        row.backend,
        f"{row.right} of {row.asked}",
        or_empty(row.stock, "{}"),
        or_empty(row.same, "{}"),
        f"{row.times.first_p50 * 1e3:.1f}",
        f"{row.times.first_p99 * 1e3:.1f}",
        or_empty(row.sparse, "{:.3f}"),
        str(sum(row.fallbacks.values())),
    )
