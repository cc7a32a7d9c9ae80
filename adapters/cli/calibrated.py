"""What `calibrate` reports: tables of speed-ups over dense attention, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict

from sparseprefill.breakeven.points import HeadShape, Point
from sparseprefill.breakeven.rule import lines, too_dense
from sparseprefill.breakeven.table import BreakEven

from ..table import Table
from . import render

DOUBT = (
    "{methods}: too dense on these inputs to be faster at any length, so counted with half of the pairs: density "
    "depends on your model, not on the length. If you use other parameters, calibrate with --set."
)


def as_table(table: BreakEven, shape: HeadShape, methods: Sequence[str]) -> None:
    """Print whole prompts, then chunks: the predicted speed-up over dense attention at the sizes measured."""
    whole = [point for point in shape.points if point.whole]
    heads = ("method", "worth it", *(f"{point.keys:,}" for point in whole))
    rows = [("dense, ms", "", *_milliseconds(whole))]
    rows += [(name, _from(table, shape, name), *_speed_ups(shape, name, whole)) for name in methods]
    title = f"{shape} on {table.device}: speed-up over dense"
    render.show(Table(title=title, heads=heads, rows=rows, words=heads[:2], drop=_shortest(heads[2:])))
    for queries in sorted({point.queries for point in shape.points if not point.whole}):
        points = [point for point in shape.points if point.queries == queries and not point.whole]
        heads = ("method", *(f"{point.keys:,}" for point in points))
        rows = [("dense, ms", *_milliseconds(points))]
        rows += [(name, *_speed_ups(shape, name, points)) for name in methods]
        title = f"the last {queries:,} rows of a prompt"
        render.show(Table(title=title, heads=heads, rows=rows, drop=_shortest(heads[1:])))
    doubtful = [name for name in methods if too_dense(shape, name)]
    if doubtful:
        render.line(DOUBT.format(methods=", ".join(doubtful)), style="dim")


def as_json(
    table: BreakEven, shape: HeadShape, methods: Sequence[str], failed: Mapping[str, str], output: Path
) -> dict[str, Any]:
    """The shape that was measured; the file holds the times."""
    return {
        "device": str(table.device),
        "versions": dict(table.versions),
        "measured": dict(table.measured),
        **{"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "dtype": shape.dtype},
        "worth_from": {name: table.length(name, shape) for name in methods},
        "ratios": {name: [asdict(one) for one in lines(shape, name)] for name in methods},
        "failed": dict(failed),
        "output": str(output),
    }


def _shortest(lengths: Sequence[str]) -> Sequence[str]:
    """Lengths that a narrow terminal leaves out, in this order: what the longest gain is what counts."""
    return lengths[:-1]


def _from(table: BreakEven, shape: HeadShape, method: str) -> str:
    least = table.length(method, shape)
    longest = max(point.keys for point in shape.points if point.whole)
    return f"not up to {longest:,}" if least is None else f"from {least:,}"


def _speed_ups(shape: HeadShape, method: str, points: Sequence[Point]) -> list[str]:
    known = {
        (line.queries or keys, keys): 1 / ratio
        for line in lines(shape, method)
        for keys, ratio in zip(line.keys, line.ratios, strict=True)
    }
    return [f"{known[at]:.2f}" if (at := (point.queries, point.keys)) in known else "" for point in points]


def _milliseconds(points: Sequence[Point]) -> list[str]:
    times = [point.dense * 1e3 for point in points]
    return [f"{time:.3g}" if time < 1000 else f"{time:,.0f}" for time in times]
