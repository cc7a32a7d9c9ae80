"""One self-contained page of what `compare` found: the table, pictures of recall, and the masks that lose most."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from sparseprefill import __version__

from ..evaluation.outcome import Layer, Outcome, Summary
from ..evaluation.reading import Sizes
from .files import write as write_file
from .picture import INK, SHADES, Panel, sheet
from .results import NOTES, failures, made, notes_of, summaries

WORST = 4
"""Heads of a method whose masks are shown."""


def write(path: Path, found: Sequence[Outcome], title: str, command: str, sizes: Sizes) -> None:
    """Write the page of outcomes, the stock model's among them."""
    rows = summaries(found, sizes)
    table = made(rows)
    page = Environment(loader=PackageLoader("sparseprefill.adapters.cli"), autoescape=True, undefined=StrictUndefined)
    text = page.get_template("page.html").render(
        title=title,
        command=command,
        version=__version__,
        heads=table.heads,
        lines=table.rows,
        remarks=failures(rows),
        notes=notes_of(NOTES, sizes),
        frontier=_frontier(rows),
        methods=[_method(label, [one for one in found if one.contender.label == label]) for label in _labels(found)],
    )
    write_file("--html", path, text)


def _labels(found: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(one.contender.label for one in found if one.fidelity is not None and not one.error))


def _method(label: str, found: Sequence[Outcome]) -> dict[str, Any]:
    done = [one for one in found if not one.error]
    parameters = done[0].contender.parameters
    return {
        "name": label,
        "parameters": ", ".join(f"{name}={value}" for name, value in parameters.items()),
        "recall": _recall(done),
        "masks": _masks(done[0]),
    }


def _frontier(rows: Sequence[Summary]) -> str:
    """Speed-up against KL, a point a method; empty where nothing was measured."""
    points = [
        (one.contender.label, times, one.inside.kl)
        for one in rows
        if one.inside is not None and (times := one.speed_up(rows[0])) is not None
    ]
    if not points:
        return ""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axis = figure.subplots()
    least = 1e-7  # a logarithmic axis has no zero
    for label, times, kl in points:
        axis.plot(times, max(kl, least), "o", color="#3f7fb8", markersize=6)
        axis.annotate(label, (times, max(kl, least)), textcoords="offset points", xytext=(6, 4), fontsize=8, color=INK)
    axis.set_yscale("log")
    axis.invert_yaxis()
    axis.axvline(1.0, color="#cccccc", linewidth=1, zorder=0)
    axis.set_xlabel("speed-up of the prefill (stock = 1)", color=INK)
    axis.set_ylabel("KL(dense || sparse), nats; higher is better", color=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return _embedded(figure)


def _recall(found: Sequence[Outcome]) -> str:
    """Layers x heads: recall over the whole prompt, and over its last rows, averaged over the prompts."""
    figure = Figure(figsize=(9.6, 0.9 + 0.16 * max(6, len(found[0].layers))), layout="constrained")
    axes = figure.subplots(1, 2)
    shades = ScalarMappable(Normalize(0.0, 1.0), SHADES)
    for axis, name, title in zip(axes, ("recalls", "last"), ("whole prompt", "its last rows"), strict=True):
        grid = np.nanmean([_grid(one.layers, name) for one in found], axis=0)
        axis.imshow(grid, cmap=shades.cmap, norm=shades.norm, aspect="auto", interpolation="nearest")
        axis.set_title(title, fontsize=9, color=INK)
        axis.set_xlabel("query head", fontsize=8, color=INK)
        axis.tick_params(labelsize=7, colors=INK, length=2)
    axes[0].set_ylabel("layer", fontsize=8, color=INK)
    bar = figure.colorbar(shades, ax=list(axes), shrink=0.9, aspect=18)
    bar.set_label("attention mass kept", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7, colors=INK, length=2)
    return _embedded(figure)


def _grid(layers: Sequence[Layer], name: str) -> Any:
    """``[layers, heads]``; layers with fewer heads end in NaN."""
    lines = [getattr(layer, name) or layer.recalls for layer in layers]
    width = max(map(len, lines))
    return np.array([[*line, *[math.nan] * (width - len(line))] for line in lines])


def _masks(outcome: Outcome) -> str:
    """Masks of the heads with the lowest recall, one a layer; empty where none is at hand."""
    kept = [(layer, *layer.lowest) for layer in outcome.layers if layer.lowest is not None]
    kept.sort(key=lambda one: min(one[0].recalls[one[1]], one[0].last[one[1]] if one[0].last else 1.0))
    panels = [
        Panel(
            f"layer {layer.index}, head {head}",
            f"density {mask.density:.1%}, recall {layer.recalls[head]:.1%}"
            + (f", last {layer.last[head]:.0%}" if layer.last else ""),
            outcome.tokens,
            mask,
            f"lowest of its sampled rows: recall {layer.row_lowest[head]:.1%}" if layer.row_lowest else "",
        )
        for layer, head, mask in kept[:WORST]
    ]
    return _embedded(sheet(panels, "heads with the lowest recall (grey: the future)"), "png") if panels else ""


def _embedded(figure: Figure, kind: str = "svg") -> str:
    """The figure as an address that holds it."""
    held = BytesIO()
    figure.savefig(held, format=kind)
    name = "svg+xml" if kind == "svg" else kind
    return f"data:image/{name};base64,{base64.b64encode(held.getvalue()).decode('ascii')}"
