"""How the times of `requests` are shown."""

from __future__ import annotations

from typing import Any

import torch
from attrs import asdict

from lab.bench.shape import Shape

from .several import Launched
from .sheet import ON_CPU, Form

NOTES = (
    "estimate: milliseconds of making the masks of all requests, one by one; none for made-up masks. together, apart: "
    "milliseconds of computing them, in as few launches as possible and one by one. together / apart: below 1 sharing "
    "launches is faster. launches: of the forward kernel, together. diff.: largest difference of the outputs."
)


def form(shape: Shape, device: torch.device) -> Form:
    """For the rows of a command."""
    return Form(
        title=f"requests of one step in one layer: {shape}",
        heads=(
            *("work", "requests", "new", "cached", "page", "density", "estimate", "together", "apart"),
            *("together / apart", "launches", "diff."),
        ),
        cells=_cells,
        fact=_fact,
        remarks=_remarks,
        notes=lambda rows: NOTES + (ON_CPU if device.type == "cpu" else ""),
    )


def _cells(row: Launched) -> tuple[str, ...]:
    case = row.case
    asked = (case.work, str(case.requests), f"{case.new:,}", f"{case.cached:,}", str(case.page))
    if row.error or row.ratio is None:
        return (*asked, "failed", "", "", "", "", "", "")
    estimate = f"{row.estimate * 1e3:.3f}" if case.method else ""
    times = (f"{row.together * 1e3:.3f}", f"{row.apart * 1e3:.3f}", f"{row.ratio:.3f}")
    return (*asked, f"{row.density:.3f}", estimate, *times, str(row.launches), f"{row.difference:.2g}")


def _fact(row: Launched) -> dict[str, Any]:
    figures = {name: value for name, value in asdict(row).items() if name != "case"}
    return {**asdict(row.case), **figures, "ratio": row.ratio, "error": row.error or None}


def _remarks(row: Launched) -> list[str]:
    case = row.case
    if row.error:
        return [f"{case.work}, {case.requests} requests of {case.new} tokens behind {case.cached} failed: {row.error}"]
    return [f"{case.work}: kernel {row.kernel}"] if row.kernel else []
