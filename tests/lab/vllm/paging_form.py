"""How the times of `pages` are shown."""

from __future__ import annotations

from typing import Any

import torch
from attrs import asdict

from lab.bench.shape import Shape

from .paging import Read
from .sheet import ON_CPU, Form

NOTES = (
    "flat, paged: milliseconds of the same work on contiguous tensors, and through the block table: the executor with "
    "a mask, or the estimate of a method. copies: of K and V out of their pages, as part of paged; auto: where the "
    "library finds that faster. paged / flat: below 1 the block table is faster. diff.: largest difference "
    "of the two outputs, or tiles and columns that one estimate chose and the other did not. copy: milliseconds of "
    "copying K and V (for an estimate only K) out of their pages."
)


def form(shape: Shape, device: torch.device) -> Form:
    """For the rows of a command."""
    return Form(
        title=f"one layer through a block table: {shape.length:,} tokens, {shape}",
        heads=("work", "page", "cache", "layout", "copies", "flat", "paged", "paged / flat", "diff.", "copy"),
        cells=_cells,
        fact=_fact,
        remarks=_remarks,
        notes=lambda rows: NOTES + (ON_CPU if device.type == "cpu" else ""),
    )


def _cells(row: Read) -> tuple[str, ...]:
    case = (row.case.work, str(row.case.page), row.case.cache, row.case.layout, row.case.copies)
    if row.error or row.ratio is None:
        return (*case, "failed", "", "", "", "")
    flat, paged, copy = (f"{x * 1e3:.2f}" for x in (row.contiguous, row.paged, row.gather))
    return (*case, flat, paged, f"{row.ratio:.3f}", f"{row.difference:.2g}", copy)


def _fact(row: Read) -> dict[str, Any]:
    figures = {name: value for name, value in asdict(row).items() if name != "case"}
    return {**asdict(row.case), **figures, "ratio": row.ratio, "error": row.error or None}


def _remarks(row: Read) -> list[str]:
    case = row.case
    if row.error:
        return [f"{case.work}, pages of {case.page}, cache {case.cache}, {case.layout} failed: {row.error}"]
    copied = row.copied and case.copies != "always"
    return [f"{case.work}, cache {case.cache}, copies {case.copies}: paged copied {row.copied} first"] if copied else []
