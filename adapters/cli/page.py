"""One self-contained page of what `compare` found: the table, pictures of recall, and the masks that lose most."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparseprefill import __version__

from ..evaluation.outcome import Layer, Outcome, Summary, summaries
from ..evaluation.reading import Sizes
from .group import write as write_file
from .options import DENSE
from .picture import INK, SHADES, Panel, sheet
from .results import small, table_of

NOTHING = 0.9995
"""Recall above which a mean reads 100.0 %."""
NO_KL = 1e-7
"""Place of a KL of 0, in nats: a logarithmic axis has no zero."""
WIDTH = 4.6
"""Inches of a picture of recall: two stand side by side on a screen, one on a phone, letters of the same size."""


@frozen
class Picture:
    """A picture as the page shows it. source: an address that holds it. what: for who cannot see it. said: below it."""

    source: str
    what: str
    said: str


def write(path: Path, found: Sequence[Outcome], title: str, command: str, sizes: Sizes) -> None:
    """Write the page of outcomes, the stock model's among them."""
    rows = summaries(found, sizes.greedy)
    labels = dict.fromkeys(one.contender.label for one in found if one.fidelity is not None and not one.error)
    page = Environment(loader=PackageLoader("sparseprefill.adapters.cli"), autoescape=True, undefined=StrictUndefined)
    text = page.get_template("page.html").render(
        title=title,
        verdict=verdict(rows),
        command=command,
        version=__version__,
        table=table_of(rows, sizes),
        frontier=_frontier(rows),
        methods=[_method([one for one in found if one.contender.label == label and not one.error]) for label in labels],
    )
    write_file("--html", path, text)


def verdict(rows: Sequence[Summary]) -> str:
    """The result in one sentence: the method whose next tokens are nearest to dense attention's.

    The first row is the stock model's; methods that failed on a prompt are left out.
    """
    stock, *others = rows
    whole = [
        (one.inside, one)
        for one in others
        if one.inside is not None and one.prompts == stock.prompts and one.contender.name != DENSE
    ]
    if not whole:
        return "No method came through every prompt."
    near, best = min(whole, key=lambda found: found[0].kl)
    times = best.speed_up(stock)
    faster = "" if times is None else f", prefill {times:.2f} times as fast"
    same = f"KL {small(near.kl)}, {near.agreement:.1%} of tokens the same"
    if best.copies.telling:
        same = f"{best.copies.right:,} tokens copied where dense copies {best.copies.dense:,}, {same}"
    return f"{best.contender.label} changes next tokens least: {same}{faster}."


def _method(done: Sequence[Outcome]) -> dict[str, Any]:
    contender = done[0].contender
    return {
        "name": contender.label,
        "parameters": ", ".join(f"{name}={value}" for name, value in contender.parameters.items()),
        "recall": _recall(done),
        "masks": _masks(done[0]),
    }


def _frontier(rows: Sequence[Summary]) -> str:
    """Speed-up against KL, a point a method; empty where nothing was measured."""
    points = [
        (one.contender.label, times, max(one.inside.kl, NO_KL))
        for one in rows
        if one.inside is not None and (times := one.speed_up(rows[0])) is not None
    ]
    if not points:
        return ""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.subplots()
    for label, times, kl in points:
        axis.plot(times, kl, "o", color="#3f7fb8", markersize=6)
        axis.annotate(label, (times, kl), textcoords="offset points", xytext=(6, 4), fontsize=8, color=INK)
    axis.set_yscale("log")
    axis.invert_yaxis()
    axis.axvline(1.0, color="#cccccc", linewidth=1, zorder=0)
    axis.set_xlabel("speed-up of the prefill (stock = 1)", color=INK)
    axis.set_ylabel("KL(dense || sparse), nats; higher is better", color=INK)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return _embedded(figure)


def _recall(found: Sequence[Outcome]) -> list[Picture]:
    """Layers x heads, means over the prompts: recall over the whole prompt, and over its last rows.

    Both share a scale that begins at the lowest value, so that what is lost can be seen where little is. Where nothing
    is lost, as with a dense tail, there is no picture.
    """
    grids = {
        where: np.nanmean([_grid(one.layers, name) for one in found], axis=0)
        for where, name in (("the whole prompt", "recalls"), ("its last rows", "last"))
    }
    lowest = min(0.99, *(float(np.nanmin(grid)) for grid in grids.values()))
    scale = Normalize(lowest, 1.0)
    shades = ScalarMappable(scale, SHADES)
    made = []
    for where, grid in grids.items():
        if np.nanmin(grid) > NOTHING:
            continue
        figure = Figure(figsize=(WIDTH, 1.2 + 0.16 * max(6, len(found[0].layers))), layout="constrained")
        axis = figure.subplots()
        axis.imshow(grid, cmap=shades.cmap, norm=scale, aspect="auto", interpolation="nearest")
        axis.set_xlabel("query head", color=INK)
        axis.set_ylabel("layer", color=INK)
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelsize=8, colors=INK, length=2)
        bar = figure.colorbar(shades, ax=axis, aspect=18)
        bar.set_label("attention mass kept", color=INK)
        bar.ax.tick_params(labelsize=8, colors=INK, length=2)
        layer, head = np.unravel_index(np.nanargmin(grid), grid.shape)
        said = f"lowest mean of a head: {grid[layer, head]:.1%}, layer {layer}, head {head}"
        made.append(Picture(_embedded(figure), f"Recall over {where}, by layer and head", said))
    return made


def _grid(layers: Sequence[Layer], name: str) -> Any:
    """``[layers, heads]``; layers with fewer heads end in NaN."""
    lines = [getattr(layer, name) or layer.recalls for layer in layers]
    width = max(map(len, lines))
    return np.array([[*line, *[math.nan] * (width - len(line))] for line in lines])


def _masks(outcome: Outcome) -> list[Picture]:
    """Masks of the heads with the lowest recall, one a layer; none where no mask was kept."""
    kept = [(layer, *layer.lowest) for layer in outcome.layers if layer.lowest is not None]
    kept.sort(key=lambda one: min(one[0].recalls[one[1]], one[0].last[one[1]] if one[0].last else 1.0))
    made = []
    for layer, head, mask in kept:
        said = f"recall {layer.recalls[head]:.1%}"
        if layer.last:
            said += f", {layer.last[head]:.1%} in its last rows"
        if layer.row_lowest:
            said += f", {layer.row_lowest[head]:.1%} in the lowest row that was looked at"
        panel = Panel(f"layer {layer.index}, head {head}", f"density {mask.density:.1%}", outcome.tokens, mask)
        made.append(Picture(_embedded(sheet([panel]), "png"), f"Mask of layer {layer.index}, head {head}", said))
    return made


def _embedded(figure: Figure, kind: str = "svg") -> str:
    """The figure as an address that holds it."""
    held = BytesIO()
    figure.savefig(held, format=kind)
    name = "svg+xml" if kind == "svg" else kind
    return f"data:image/{name};base64,{base64.b64encode(held.getvalue()).decode('ascii')}"
