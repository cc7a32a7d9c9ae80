"""Pictures of masks: each contender's for one layer and head, or the heads of one contender."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

import torch
from attrs import frozen
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure

from sparseprefill.pipeline import Pipeline
from sparseprefill.refiners.skip import SkipSoftmax
from sparseprefill.route import Route

from ..evaluation.outcome import CELLS, Outcome, Sketch
from .group import write

COLUMNS = (4, 5, 3)
"""Panels side by side: the first of these that leaves the fewest places empty."""
# One hue from white to near black, so that it reads in grey and with any colour vision.
SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", "#a6c8e4", "#3f7fb8", "#10365f"])
FUTURE, INK = "#ececec", "#333333"
LETTERS = 26
"""Of a line of a panel's title; longer ones go on in the next."""
TICKS = (0.0, 0.01, 0.1, 0.3, 1.0)


def draw(outcomes: Sequence[Outcome], layer: int, head: int, path: Path) -> None:
    """Write the picture: a panel per contender that came through, queries downwards and keys to the right."""
    shown = [_of_outcome(outcome, layer, head) for outcome in outcomes if not outcome.error]
    if shown:
        where = f"layer {layer}, head {head}, {shown[0].tokens:,} tokens"
        save(sheet(shown, ("What each prefill computes:", where)), "--picture", path)


def save(figure: Figure, option: str, path: Path, **more: Any) -> None:
    """Write a figure to the file of an option, in the format of its name; CommandError where that fails."""
    held = BytesIO()
    figure.savefig(held, format=path.suffix.lower().removeprefix(".") or "png", **more)
    write(option, path, held.getvalue())


@frozen(eq=False)
class Panel:
    """One mask: its title, what is said above and below it, the tokens of the prompt; mask None is dense."""

    title: str
    figures: str
    tokens: int
    mask: Sketch | None
    note: str = ""


def _of_outcome(outcome: Outcome, layer: int, head: int) -> Panel:
    own = next((one for one in outcome.layers if one.index == layer), None)
    density, note = 1.0 if outcome.mask is None else outcome.mask.density, ""
    if own is not None and outcome.mask is not None and _skims(outcome.contender.pipeline):
        skipped = 1 - own.density / density if density else 0.0
        note = f"of the mask, {skipped:.0%} of the layer's pairs\nare skipped while it runs"
    figures = f"density {density:.1%}, recall {1.0 if own is None else own.recalls[head]:.1%}"
    if own is not None and own.row_lowest:
        figures += f"\nlowest row {own.row_lowest[head]:.0%}"
    return Panel(outcome.contender.label, figures, outcome.tokens, outcome.mask, note)


def _skims(pipeline: Pipeline | Route | None) -> bool:
    """True if the executor may leave out tiles that the mask has."""
    known = () if pipeline is None else Route.of(pipeline).known
    return any(isinstance(stage, SkipSoftmax) for one in known for stage in one.refiners)


def sheet(shown: Sequence[Panel], title: Sequence[str] = ()) -> Figure:
    """Panels side by side, at least one, below a title in one or two lines."""
    columns = min(len(shown), min(COLUMNS, key=lambda n: -len(shown) % n) if len(shown) >= min(COLUMNS) else len(shown))
    rows = -(-len(shown) // columns)
    lines = max(len(wrap(one.title, LETTERS)) + one.figures.count("\n") for one in shown)
    figure = Figure(figsize=(2.75 * columns, (2.9 + 0.17 * lines) * rows + 1.1), dpi=160, layout="constrained")
    grid = figure.add_gridspec(rows, 2 * columns)
    axes, images = [], []
    for index, panel in enumerate(shown):
        row, column = divmod(index, columns)
        last = len(shown) - columns * row  # panels from this row on: fewer than a row of them stand in the middle
        start = 2 * column + max(0, columns - last)
        axis = figure.add_subplot(grid[row, start : start + 2])
        images.append(_draw(axis, panel))
        axis.set_ylabel("query" if column == 0 else "", fontsize=9, color=INK)
        axes.append(axis)
    if title:
        figure.suptitle(("\n" if columns == 1 else " ").join(title), color=INK, fontsize=11)
    bar = figure.colorbar(
        images[0], ax=axes, ticks=TICKS, location="bottom", shrink=min(1.0, 2 / columns), aspect=34, pad=0.02
    )
    bar.ax.set_xticklabels([f"{tick:.0%}" for tick in TICKS])
    side = -(-shown[0].tokens // min(CELLS, shown[0].tokens))
    words = ("share of a cell's pairs that is computed;", f"a cell is {side} x {side} tokens;", "grey: the future")
    bar.set_label(("\n" if columns < 3 else " ").join(words), color=INK, fontsize=8)
    bar.ax.tick_params(labelsize=7, colors=INK, length=2)
    bar.outline.set_edgecolor(FUTURE)
    return figure


def _draw(axis: Any, panel: Panel) -> Any:
    tokens, note = panel.tokens, panel.note
    shares = _shares(panel.mask, min(CELLS, tokens))
    scale = PowerNorm(0.5, 0.0, 1.0)
    image = axis.imshow(shares, cmap=SHADES, norm=scale, extent=(0, tokens, tokens, 0), interpolation="nearest")
    axis.set_facecolor(FUTURE)
    axis.set_title(panel.figures, fontsize=8, color=INK, linespacing=1.15)
    above = 4 + 11 * (panel.figures.count("\n") + 1)  # points: of the figures below
    axis.annotate(
        fill(panel.title, LETTERS), (0.5, 1.0), xytext=(0, above), xycoords="axes fraction",
        textcoords="offset points", ha="center", va="bottom", color=INK, weight="bold", fontsize=9.5,
    )  # fmt: skip
    step = 1 << max(0, (tokens - 1).bit_length() - 2)
    ticks = range(0, tokens + 1, step)
    labels = [f"{tick // 1024}K" if tick % 1024 == 0 and tick else str(tick) for tick in ticks]
    axis.set_xticks(ticks, labels)
    axis.set_yticks(ticks, labels)
    axis.set_xlabel(f"key\n{note}" if note else "key", fontsize=8 if note else 9, color=INK, labelpad=1)
    axis.tick_params(labelsize=7, colors=INK, length=2)
    for side in axis.spines.values():
        side.set_visible(False)
    return image


def _shares(mask: Sketch | None, cells: int) -> Any:
    if mask is not None:
        return mask.shares.numpy()
    ones = torch.ones(cells, cells, dtype=torch.float32, device="cpu")
    return ones.masked_fill(ones.triu(1).bool(), torch.nan).numpy()
