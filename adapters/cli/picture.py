"""Pictures of masks: each contender's for one layer and head, or the heads of one contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure

from sparseprefill.mask.mask import SparseMask

from ..evaluation.outcome import Outcome
from .files import check_writable

CELLS = 128
COLUMNS = 4
# One hue from white to near black, so that it reads in grey and with any colour vision.
SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", "#a6c8e4", "#3f7fb8", "#10365f"])
FUTURE, INK = "#ececec", "#333333"
TICKS = (0.0, 0.01, 0.1, 0.3, 1.0)


def check_path(path: Path) -> None:
    """CommandError, before any work is done, where the picture cannot be written there."""
    check_writable("--picture", path, ".png")


def draw(outcomes: Sequence[Outcome], layer: int, head: int, path: Path) -> None:
    """Write the picture: a panel per contender that came through, queries downwards and keys to the right."""
    shown = [_of_outcome(outcome, layer, head) for outcome in outcomes if not outcome.error]
    if shown:
        where = f"layer {layer}, head {head}, {shown[0].tokens:,} tokens (grey: the future)"
        _figure(shown, ("What each prefill computes:", where)).savefig(path, format="png")


@frozen(eq=False)
class Panel:
    """One mask: its title, what is said below, the tokens of the prompt; mask None is dense."""

    title: str
    figures: str
    tokens: int
    mask: SparseMask | None


def sheet(panels: Sequence[Panel], title: str) -> Figure:
    """Panels side by side, at least one."""
    return _figure(panels, (title,))


def _of_outcome(outcome: Outcome, layer: int, head: int) -> Panel:
    density = 1.0 if outcome.mask is None else outcome.mask.density
    recall = next((one.recalls[head] for one in outcome.layers if one.index == layer), 1.0)
    figures = f"density {density:.1%}, recall {recall:.1%}"
    return Panel(outcome.contender.label, figures, outcome.tokens, outcome.mask)


def _figure(shown: Sequence[Panel], title: Sequence[str]) -> Figure:
    rows = -(-len(shown) // COLUMNS)
    columns = -(-len(shown) // rows)
    figure = Figure(figsize=(2.75 * columns + 0.9, 3.05 * rows + 0.5), dpi=160, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    images = []
    for index, (axis, panel) in enumerate(zip(axes, shown, strict=False)):
        images.append(_draw(axis, panel))
        axis.set_ylabel("query" if index % columns == 0 else "", fontsize=9, color=INK)
    figure.suptitle(("\n" if columns == 1 else " ").join(title), color=INK, fontsize=11)
    bar = figure.colorbar(images[0], ax=axes, ticks=TICKS, shrink=0.8 if rows == 1 else 0.5, aspect=22, pad=0.012)
    bar.ax.set_yticklabels([f"{tick:.0%}" for tick in TICKS])
    bar.set_label("pairs computed in a cell", color=INK, fontsize=8)
    bar.ax.tick_params(labelsize=7, colors=INK, length=2)
    bar.outline.set_edgecolor(FUTURE)
    return figure


def _draw(axis: Any, panel: Panel) -> Any:
    tokens = panel.tokens
    image = axis.imshow(
        _shares(panel.mask, min(CELLS, tokens)),
        cmap=SHADES,
        norm=PowerNorm(0.5, 0.0, 1.0),
        extent=(0, tokens, tokens, 0),
        interpolation="nearest",
    )
    axis.set_facecolor(FUTURE)
    axis.text(0.5, 1.105, panel.title, transform=axis.transAxes, ha="center", color=INK, weight="bold")
    axis.set_title(panel.figures, fontsize=8.5, color=INK)
    step = 1 << max(0, (tokens - 1).bit_length() - 2)
    ticks = range(0, tokens + 1, step)
    labels = [f"{tick // 1024}K" if tick % 1024 == 0 and tick else str(tick) for tick in ticks]
    axis.set_xticks(ticks, labels)
    axis.set_yticks(ticks, labels)
    axis.set_xlabel("key", fontsize=9, color=INK, labelpad=1)
    axis.tick_params(labelsize=7, colors=INK, length=2)
    for side in axis.spines.values():
        side.set_visible(False)
    return image


def _shares(mask: SparseMask | None, cells: int) -> Any:
    if mask is None:
        return torch.ones(cells, cells).masked_fill(torch.ones(cells, cells).triu(1).bool(), torch.nan).numpy()
    return mask.shade(cells)[0, 0].cpu().numpy()
