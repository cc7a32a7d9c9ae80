"""The picture of `bench`: time against length, and recall against density."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..bench.measure import Row

MARKS = "osD^vP*Xhp"
INK, GRID, DENSE = "#333333", "#e6e6e6", "#999999"


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Write the picture; False where no row came through."""
    shown = [row for row in rows if not row.error]
    if not shown:
        return False
    several = len({str(row.case.shape) for row in shown}) > 1
    series: dict[str, list[Row]] = {}
    for row in shown:
        name = f"{row.case.name}, gated" if row.case.gate else row.case.name
        series.setdefault(f"{name}, {row.case.shape}" if several else name, []).append(row)
    styles = {name: {"marker": MARKS[i % len(MARKS)], "color": f"C{i % 10}"} for i, name in enumerate(series)}
    kept = any(row.recall is not None for row in shown)
    figure = Figure(figsize=(11.0 if kept else 6.5, 4.6), dpi=160, layout="constrained")
    axes = list(figure.subplots(1, 2 if kept else 1, squeeze=False).flat)
    _times(axes[0], series, styles)
    if kept:
        _kept(axes[1], series, styles)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)
    return True


def _times(axis: Any, series: dict[str, list[Row]], styles: dict[str, Any]) -> None:
    rows = [row for found in series.values() for row in found]
    dense = _by_length((row.case.shape.length, row.dense * 1e3) for row in rows)
    axis.plot(*zip(*dense, strict=True), color=DENSE, linestyle="--", marker="x", label=f"dense ({rows[0].baseline})")
    for name, found in series.items():
        points = _by_length((row.case.shape.length, row.seconds * 1e3) for row in found)
        axis.plot(*zip(*points, strict=True), label=name, markersize=5, linewidth=1, **styles[name])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({row.case.shape.length for row in rows})
    axis.set_xticks(ticks, [f"{tick // 1024}K" if tick % 1024 == 0 else str(tick) for tick in ticks])
    times = [value for row in rows for value in (row.seconds * 1e3, row.dense * 1e3)]
    axis.set_yticks(*_ticks(times, "{:g}"))
    dress(axis, "time of one layer's attention", "tokens", "ms")


def _kept(axis: Any, series: dict[str, list[Row]], styles: dict[str, Any]) -> None:
    found = {name: [row for row in rows if row.recall is not None] for name, rows in series.items()}
    longest = max(row.case.shape.length for rows in found.values() for row in rows)
    densities = []
    for name, rows in found.items():
        points = sorted((row.density, row.recall) for row in rows if row.case.shape.length == longest)
        if points:
            densities += [density for density, _ in points]
            axis.plot(*zip(*points, strict=True), markersize=5, linewidth=1, **styles[name])
    axis.set_xscale("log")
    axis.set_xticks(*_ticks([100 * density for density in densities], "{:g} %", scale=0.01))
    dress(axis, f"what was kept at {longest:,} tokens", "density", "recall")


def _ticks(values: Iterable[float], text: str, scale: float = 1.0) -> tuple[list[float], list[str]]:
    """1, 2, 5, 10, ... around the values of a logarithmic axis."""
    values = [value for value in values if value > 0] or [1.0]
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    steps = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    inside = [step for step in steps if min(values) / 2.1 <= step <= max(values) * 2.1]
    return [step * scale for step in inside], [text.format(step) for step in inside]


def _by_length(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The best of each length: settings of one method differ."""
    best: dict[int, float] = {}
    for length, value in points:
        best[length] = min(value, best.get(length, value))
    return sorted(best.items())


def dress(axis: Any, title: str, across: str, up: str = "") -> None:
    """Title, names of the axes, and the look that all pictures of figures have."""
    axis.set_title(title, fontsize=10, color=INK)
    axis.set_xlabel(across, fontsize=9, color=INK)
    axis.set_ylabel(up, fontsize=9, color=INK)
    axis.tick_params(labelsize=8, colors=INK)
    axis.grid(True, color=GRID, linewidth=0.6)
    axis.minorticks_off()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
