"""The picture of the similarity matrix: heads by heads, in the order of their clusters."""

from __future__ import annotations

from pathlib import Path

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from .table import NOISE, ClusterTable

SHADES = LinearSegmentedColormap.from_list("shades", ["#ffffff", "#a6c8e4", "#3f7fb8", "#10365f"])
INK, GREY, EDGE = "#333333", "#999999", "#d1495b"
NAMED = 48
"""Up to so many heads have their names at the axes."""


def draw(similar: Tensor, heads: list[tuple[int, int]], table: ClusterTable, path: Path) -> None:
    """Write a PNG; similar ``[n, n]`` belongs to `heads`. Clusters are framed, noise comes last."""
    groups = [*table.clusters, table.noise]
    order = [heads.index(head) for group in groups for head in group]
    figure = Figure(figsize=(6.6, 5.8), dpi=160, layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(similar[order][:, order].numpy(), cmap=SHADES, vmin=0.0, vmax=1.0, interpolation="nearest")
    at = -0.5
    for label, group in enumerate(table.clusters):
        size = len(group)
        frame = [at, at + size, at + size, at, at], [at, at, at + size, at + size, at]
        axis.plot(*frame, color=EDGE, linewidth=1.5, clip_on=False)
        axis.text(at + size, at, f" {label}", color=EDGE, fontsize=8, va="top", ha="left")
        at += size
    if table.noise:  # told apart: paler, and framed in grey
        end = len(order) - 0.5
        for corner, width, height in (((at, -0.5), end - at, end + 0.5), ((-0.5, at), at + 0.5, end - at)):
            axis.add_patch(Rectangle(corner, width, height, facecolor="white", alpha=0.55, linewidth=0))
        axis.plot(
            [at, end, end, at, at], [at, at, end, end, at], color=GREY, linewidth=1.5, linestyle="--", clip_on=False
        )
        axis.text(end, at, " noise", color=INK, fontsize=8, va="top", ha="left")
    if len(heads) <= NAMED:
        names = ["{}.{}".format(*heads[i]) for i in order]
        axis.set_xticks(range(len(order)), names, rotation=90)
        axis.set_yticks(range(len(order)), names)
        for text, i in zip(axis.get_yticklabels(), order, strict=True):
            text.set_color(GREY if table.label(*heads[i]) == NOISE else INK)
    else:
        axis.set_xticks([])
        axis.set_yticks([])
    axis.tick_params(labelsize=6, length=0)
    axis.set_xlabel(
        "layer.head, by cluster; pale, with grey names: noise, heads that share with nobody", fontsize=8, color=INK
    )
    title = (
        f"Similarity of {len(heads)} heads. Clusters: {len(table.clusters)}, heads that are noise: {len(table.noise)}"
    )
    axis.set_title(title, fontsize=10, color=INK)
    bar = figure.colorbar(image, ax=axis, shrink=0.8, aspect=26)
    bar.set_label("blocks in both patterns / blocks in either", color=INK, fontsize=8)
    bar.ax.tick_params(labelsize=7, colors=INK, length=2)
    for side in [*axis.spines.values(), bar.outline]:
        side.set_visible(False)
    figure.savefig(path, format="png")
