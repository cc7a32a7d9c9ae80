"""How times to the first token are shown."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import asdict

from .first_token import FirstToken, Timed
from .sheet import ON_CPU, Form, or_empty, remarks

NOTES = (
    "step: tokens that the engine computes at a time. s: seconds from the request to its first token, the median of "
    "{rounds}. speed-up: time of {stock} / time of this row. attn s: dense attention alone, of all layers and the "
    "whole prompt in one piece, by {kernels}, measured in the same run; it is not part of any row's time. density: "
    "pairs computed / causal pairs. GiB: peak memory of PyTorch beyond what was held before the request."
)
HEADS = " Every backend's attention runs on q and k of made-up heads in place of the random model's own."
OWN = " Attention runs on the random model's own q and k, which have no structure for a method to find."


def form(bench: FirstToken) -> Form:
    """For the rows of a command."""
    shape, structure = bench.setup.shape, bench.structure

    def notes(rows: Sequence[Timed]) -> str:
        kernels = " and ".join(dict.fromkeys(row.kernel for row in rows if row.kernel)) or "no kernel"
        text = NOTES.format(rounds=bench.rounds, stock=bench.setup.stock, kernels=kernels)
        return text + (HEADS if structure.heads else OWN) + (ON_CPU if structure.device.type == "cpu" else "")

    return Form(
        title=f"first token: {shape.layers} layers of width {shape.hidden}, {shape.dtype}, random weights",
        heads=("backend", "tokens", "step", "s", "speed-up", "attn s", "density", "GiB"),
        cells=_cells,
        fact=lambda row: {**asdict(row), "speedup": row.speedup, "error": row.error or None},
        remarks=_remarks,
        notes=notes,
    )


def _cells(row: Timed) -> tuple[str, ...]:
    if row.error:
        return (row.backend, "failed", *[""] * 6)
    return (
        row.backend,
        str(row.tokens),
        str(row.chunk),
        f"{row.seconds:.4f}",
        or_empty(row.speedup, "{:.2f}"),
        or_empty(row.attention, "{:.4f}"),
        or_empty(row.density, "{:.4f}"),
        or_empty(None if row.extra is None else row.extra / 2**30, "{:.2f}"),
    )


def _remarks(row: Timed) -> list[str]:
    return remarks(f"{row.backend}, {row.tokens} tokens in steps of {row.chunk}", row)
