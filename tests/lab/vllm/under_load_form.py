"""How times under load are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import asdict

from .sheet import ON_CPU, Form, or_empty, remarks
from .under_load import Loaded, UnderLoad

NOTES = (
    "{requests} requests {rate}, {answer} tokens decoded each, steps of at most {budget} tokens. first p50, p99: "
    "milliseconds from a request's coming to its first token. token p50: milliseconds of each token behind the first. "
    "x first, x p99, x token, x tokens/s: how many times better than the first row, {baseline}. tokens/s: prompt "
    "tokens that were computed (those in the prefix cache are not) by the seconds from the first request to the last "
    "token, req/s likewise. method: share of these tokens in chunks that ran the method. density: pairs computed / "
    "causal pairs of one request of each length, alone. dense calls: those that fell back while the clock ran, of all "
    "layers. extra GiB: most that PyTorch held while the clock ran beyond what it held before."
)
HEADS = " Attention runs on q and k of made-up heads, chosen by each token's position."
OWN = " Attention runs on the random model's own q and k, which have no structure for a method to find."
TIMES = ("first p50", "first p99", "token p50", "x first", "x p99", "x token", "tokens/s", "req/s", "x tokens/s")


def form(bench: UnderLoad) -> Form:
    """For the rows of a command."""
    shape = bench.setup.shape

    def notes(rows: Sequence[Loaded]) -> str:
        text = NOTES.format(
            requests=bench.requests,
            rate=f"at {bench.rate:g} a second (Poisson)" if bench.rate else "at once",
            answer=bench.answer,
            budget=bench.budget,
            baseline=bench.baseline,
        )
        heads = HEADS if bench.structure.heads else OWN
        return text + heads + (ON_CPU if bench.structure.device.type == "cpu" else "")

    return Form(
        title=f"under load: {shape.layers} layers of width {shape.hidden}, {shape.dtype}, random weights",
        heads=("backend", "shape", *TIMES, "method", "density", "dense calls", "extra GiB"),
        cells=_cells,
        fact=_fact,
        remarks=_remarks,
        notes=notes,
    )


def _cells(row: Loaded) -> tuple[str, ...]:
    if row.error or row.times is None:
        return (row.backend, "failed", *[""] * (len(TIMES) + 4))
    times, over = row.times, row.speedups
    return (
        row.backend,
        row.shape,
        f"{times.first_p50 * 1e3:.1f}",
        f"{times.first_p99 * 1e3:.1f}",
        or_empty(None if times.token_p50 is None else times.token_p50 * 1e3, "{:.2f}"),
        *(or_empty(over[name], "{:.2f}") for name in ("first", "first_p99", "token")),
        f"{row.computed / times.seconds:.0f}",
        f"{row.requests / times.seconds:.2f}",
        or_empty(over["throughput"], "{:.2f}"),
        or_empty(row.sparse, "{:.3f}"),
        or_empty(row.density, "{:.4f}"),
        str(sum(row.fallbacks.values())),
        or_empty(None if row.extra is None else row.extra / 2**30, "{:.2f}"),
    )


def _fact(row: Loaded) -> dict[str, Any]:
    """Seconds and counts, and what follows from them."""
    found = {name: value for name, value in asdict(row, recurse=False).items() if name not in ("times", "baseline")}
    found |= {"times": None if row.times is None else asdict(row.times), "computed": row.computed}
    if row.times is not None:
        seconds = row.times.seconds
        found |= {"tokens_per_second": row.computed / seconds, "requests_per_second": row.requests / seconds}
    return {**found, "over_baseline": row.speedups, "error": row.error or None}


def _remarks(row: Loaded) -> list[str]:
    return remarks(f"{row.backend}, {row.shape}", row)
