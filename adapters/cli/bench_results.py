"""What `bench` reports: tables, JSON, Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..bench import facts
from ..bench.measure import ROWS, Row
from ..bench.model import ModelShape
from ..bench.ttft import Timed
from . import render

COLUMNS = ("what", "ms", "mask", "density", "speed-up", "eff.", "recall", "rows", "lowest")
DROP = ("mask", "eff.", "rows", "recall", "lowest", "density")
"""Columns that a narrow terminal leaves out, in this order."""
NOTES = (
    "ms: median time of the whole call, by the device's clock; mask: the part of it until the mask is there. density: "
    "pairs computed / causal pairs. speed-up: dense attention's time, measured beside the row, / this time. eff.: "
    "density x speed-up. recall: share of the attention mass kept, exact, mean over heads and {rows} sampled rows; "
    "rows: 1st percentile of these rows; lowest: lowest mean of a head."
)
ON_CPU = (
    "These are times on a CPU, where PyTorch's own fused attention runs over gathered keys. They say nothing about the "
    "kernels, which need a GPU."
)
TTFT = ("method", "seconds", "speed-up", "density")
TTFT_NOTES = {
    "heads": (
        "Random weights attend to nothing in particular, so each layer's attention runs on q and k of made-up heads "
        "instead of its own. speed-up: the stock model's time / this time. density: pairs computed / causal pairs, "
        "mean over layers."
    ),
    "model": (
        "Random weights attend to nothing in particular, so these are the costs if a method finds no structure. "
        "speed-up: the stock model's time / this time. density: pairs computed / causal pairs, mean over layers."
    ),
}


def as_tables(rows: Sequence[Row], on_cpu: bool) -> None:
    """Print a table for each length and shape, and what the columns mean."""
    for group in facts.grouped(rows):
        render.figures(facts.title(group[0]), COLUMNS, map(_cells, group), _remarks(group), drop=DROP)
    render.line(NOTES.format(rows=ROWS) + (f" {ON_CPU}" if on_cpu else ""), style="dim")


def as_json(rows: Sequence[Row], timed: Sequence[Timed], settings: dict[str, Any], device: torch.device) -> Any:
    """Everything that was measured."""
    from attrs import asdict

    model = [{**asdict(one), "speedup": one.speedup, "error": one.error or None} for one in timed]
    return facts.about(device, **settings, rows=[facts.fact(row) for row in rows], ttft=model)


def as_ttft(timed: Sequence[Timed], shape: ModelShape, on_cpu: bool) -> None:
    """Print the times of whole models."""
    for tokens in dict.fromkeys(one.tokens for one in timed):
        group = [one for one in timed if one.tokens == tokens]
        head = f"first token of {tokens:,}, {shape.layers} layers of Llama-3-8B's shape, {shape.dtype}, random weights"
        if shape.hidden != ModelShape().hidden:
            head = f"first token of {tokens:,}, {shape.layers} layers of width {shape.hidden}, {shape.dtype}"
        notes = TTFT_NOTES[group[0].structure] + (f" {ON_CPU}" if on_cpu else "")
        render.figures(head, TTFT, map(_timed, group), _ttft_remarks(group), notes)


def _cells(row: Row) -> tuple[str, ...]:
    """As for Markdown, narrower: parameters under the name, density in percent, fewer digits."""
    _, *figures = facts.cells(row)
    if not row.error:
        figures[0] = f"{row.seconds * 1e3:.4g}"
        figures[1] = "" if row.estimate is None else f"{row.estimate * 1e3:.3g}"
        figures[2] = f"{row.density * 100:.3g}%"
    parameters = [f"  {name}={value}" for name, value in row.case.parameters.items()]
    name = f"{row.case.name}, gated" if row.case.gate else row.case.name
    return "\n".join([name, *parameters]), *figures


def _timed(one: Timed) -> tuple[str, ...]:
    if one.error:
        return one.name, "failed", "", ""
    density = "" if one.density is None else f"{one.density:.4f}"
    return one.name, f"{one.seconds:.3f}", f"{one.speedup:.2f}", density


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    yield facts.dense_text(rows)
    for row in rows:
        if row.error:
            yield f"{row.case.label} failed: {row.error}"
        if row.note:
            yield f"{row.case.label} ran dense: {row.note}"
    most = max(rows, key=lambda row: row.extra or 0)
    if most.extra:
        parts = f", in {most.parts} parts" if most.parts > 1 else ""
        yield f"most memory beyond inputs and result: {most.extra / 2**30:.2f} GiB, {most.case.label}{parts}"


def _ttft_remarks(timed: Sequence[Timed]) -> Iterator[str]:
    for one in timed:
        if one.error:
            yield f"{one.name} failed: {one.error}"
        for reason, count in one.dense_layers.items():
            yield f"{one.name}: {count} layers ran dense: {reason}"
