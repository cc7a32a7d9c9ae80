"""The picture of a bench: speed-up over dense attention, and recall against density."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from sparseprefill.adapters.cli.picture import save

from .measure import Row

MARKS = "osD^vP*Xhp"
INK, GRID, DENSE = "#333333", "#e6e6e6", "#999999"
SHADES = ("#7fb0d6", "#10365f")
"""Bars of the shorter and of the longer prompt."""
LINE = 3
"""Points that make a line; fewer stand alone."""


def draw(rows: Sequence[Row], path: Path, hardware: str, about: Mapping[str, str] | None = None) -> bool:
    """Write the picture; False where no row came through.

    hardware: name of the device, for the title. about: what the file says of itself (matplotlib's ``metadata``).
    """
    shown = [row for row in rows if not row.error]
    if not shown:
        return False
    several = len({_sizes(row) for row in shown}) > 1
    series: dict[str, list[Row]] = {}
    for row in shown:
        name = f"{row.case.name}, gated" if row.case.gate else row.case.name
        series.setdefault(f"{name}, {_sizes(row)}" if several else name, []).append(row)
    styles = {
        name: {"marker": MARKS[i % len(MARKS)], "color": f"C{i % 10}", "markersize": 5, "linewidth": 1}
        for i, name in enumerate(series)
    }
    kept = any(row.recall is not None for row in shown)
    lengths = sorted({row.case.shape.length for row in shown})
    bars = [_label(row, several) for row in shown]
    tall = 4.6 if len(lengths) >= LINE else max(3.4, 0.16 * len(lengths) * len(set(bars)) + 1.6)
    figure = Figure(figsize=(11.0 if kept else 6.5, tall), dpi=160, layout="constrained")
    axes = list(figure.subplots(1, 2 if kept else 1, squeeze=False).flat)
    if len(lengths) >= LINE:
        _curves(axes[0], series, styles, lengths)
    else:
        _bars(axes[0], shown, bars, lengths)
    dress(axes[0], "speed-up: dense time / time, estimate included", axes[0].get_xlabel())
    axes[0].grid(len(lengths) >= LINE, axis="y")
    if kept:
        _kept(axes[1], series, styles)
    if kept or len(lengths) >= LINE:
        handles, labels = axes[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    sizes = "several shapes" if several else _sizes(shown[0])
    dense = ", ".join(sorted({row.baseline for row in shown}))
    figure.suptitle(f"One layer's attention, {sizes}, on {hardware}; dense: {dense}", fontsize=10.5, color=INK)
    save(figure, "--plot", path, metadata=dict(about or {}))
    return True


def _sizes(row: Row) -> str:
    return str(row.case.shape)


def _label(row: Row, several: bool) -> str:
    return f"{row.case.label}, {_sizes(row)}" if several else row.case.label


def _bars(axis: Any, rows: Sequence[Row], labels: Sequence[str], lengths: Sequence[int]) -> None:
    """A bar for each row, a shade for each length, the first row at the top."""
    names = list(dict.fromkeys(labels))
    thick = 0.8 / len(lengths)
    drawn: dict[tuple[str, int], Row] = {}
    for name, row in zip(labels, rows, strict=True):
        drawn.setdefault((name, row.case.shape.length), row)
    for index, length in enumerate(lengths):
        color = SHADES[index + len(SHADES) - len(lengths)]
        found = [(names.index(name), row.speedup) for (name, own), row in drawn.items() if own == length]
        places = [at - 0.4 + thick * (index + 0.5) for at, _ in found]
        values = [value for _, value in found]
        axis.barh(places, values, height=0.92 * thick, color=color, label=f"{length:,} tokens")
        for place, value in zip(places, values, strict=True):
            axis.text(
                value, place, f" {value:.2g}" if value < 1 else f" {value:.1f}", va="center", fontsize=7, color=INK
            )
    axis.axvline(1.0, color=DENSE, linestyle="--", linewidth=1, label="dense")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.margins(x=0.12)
    axis.set_xlabel("dashed: dense")
    axis.legend(fontsize=8, frameon=False, loc="lower right")


def _curves(axis: Any, series: dict[str, list[Row]], styles: dict[str, Any], lengths: Sequence[int]) -> None:
    """Speed-up by length; of several settings of one method the fastest."""
    for name, found in series.items():
        points = _by_length((row.case.shape.length, row.speedup) for row in found)
        axis.plot(*zip(*points, strict=True), label=name, **_joined(styles[name], len(points)))
    axis.axhline(1.0, color=DENSE, linestyle="--", linewidth=1, label="dense")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{tick // 1024}K" if tick % 1024 == 0 else str(tick) for tick in lengths])
    axis.set_xlabel("tokens")


def _kept(axis: Any, series: dict[str, list[Row]], styles: dict[str, Any]) -> None:
    found = {name: [row for row in rows if row.recall is not None] for name, rows in series.items()}
    longest = max(row.case.shape.length for rows in found.values() for row in rows)
    densities: list[float] = []
    for name, rows in found.items():
        points = sorted((row.density, row.recall) for row in rows if row.case.shape.length == longest)
        if points:
            densities += [density for density, _ in points]
            axis.plot(*zip(*points, strict=True), label=name, **_joined(styles[name], len(points)))
    axis.set_xscale("log")
    axis.set_xticks(*_ticks([100 * density for density in densities], "{:g} %", scale=0.01))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    dress(axis, f"what was kept at {longest:,} tokens", "density", "recall")


def _joined(style: dict[str, Any], points: int) -> dict[str, Any]:
    return style if points >= LINE else style | {"linestyle": "none"}


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
        best[length] = max(value, best.get(length, value))
    return sorted(best.items())


def dress(axis: Any, title: str, across: str, up: str = "") -> None:
    """Title, names of the axes, and the look that all pictures of figures have."""
    axis.set_title(title, fontsize=10, color=INK)
    axis.set_xlabel(across, fontsize=9, color=INK)
    axis.set_ylabel(up, fontsize=9, color=INK)
    axis.tick_params(labelsize=8, colors=INK)
    axis.set_axisbelow(True)
    axis.grid(True, color=GRID, linewidth=0.6)
    axis.minorticks_off()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
