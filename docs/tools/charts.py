"""The bars of README and docs/benchmarks.md, drawn from the tables of the pages.

Run `PYTHONPATH=tests python docs/tools/charts.py` in a clone.

Nothing is measured here, and no figure stands here: the pictures show the rows that the page has. Each carries a digest
of its section, by which a test sees that the page has changed since.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.bench import plot as bench_plot
from lab.bench.case import Case
from lab.bench.measure import Row as Measured
from lab.bench.shape import Shape

DOCS = Path(__file__).parents[1]
PAGES, SECTION = (DOCS / "benchmarks.md", DOCS / "benchmarks-more.md"), "131,072 tokens"
METHODS = tuple(f"methods: {tokens} tokens, 32 / 8 heads, d 128, bfloat16" for tokens in ("32,768", "131,072"))
SPEED, BENCH = DOCS / "pictures" / "speed.png", DOCS / "pictures" / "bench.png"
SOURCE = "Source"
"""The PNG's field that holds the digest."""
HARDWARE = "NVIDIA H200, bfloat16"
COLUMNS = {"inside": 0.2, "end": 0.46, "KL": 0.74, "density": 1.0}
"""What stands beside the bars, and where each column ends."""
KEEPS = 0.98
"""Share of dense's answers inside that a method keeps that does not lose them."""
DEFAULT, LOSES, INK, GRID = "#10365f", "#c97b63", "#333333", "#e6e6e6"


class Row(NamedTuple):
    """One method at one setting, as the table has it."""

    method: str
    setting: str
    inside: str
    end: str
    kl: str
    density: str
    speed_up: float


def section(heading: str) -> str:
    """What stands below the heading, up to the next one of its level."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return text.split(f"\n### {heading}\n", 1)[1].split("\n### ", 1)[0]


def digest(*headings: str) -> str:
    """Of the sections' text."""
    return sha256("".join(map(section, headings)).encode()).hexdigest()


def cells(text: str, *names: str) -> list[list[str]]:
    """The columns of the section's table, by their names."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    at = [lines[0].index(name) for name in names]
    return [[line[i] for i in at] for line in lines[2:]]


def rows(text: str) -> list[Row]:
    """The rows of the section's table."""
    found = cells(text, "method", "setting", "inside", "end", "KL", "density", "speed-up")
    return [Row(*line[:6], speed_up=float(line[6])) for line in found]


def dense_answers(text: str) -> int:
    """How many answers inside the text the model finds with its own attention."""
    found = re.search(r"finds (\d+) of \d+ answers inside", text)
    if found is None:
        raise ValueError(f"section {SECTION!r}: no sentence says what the model's own attention finds")
    return int(found[1])


def measured() -> list[Measured]:
    """The methods on made-up heads, as the bench had measured them."""
    found = []
    for heading in METHODS:
        tokens = int(heading.split()[1].replace(",", ""))
        for name, *figures in cells(section(heading), "what", "ms", "density", "speed-up", "recall", "lowest"):
            ms, density, speed_up, recall, lowest = map(float, figures)
            case = Case(table="methods", name=name, shape=Shape(length=tokens))
            kept = {"density": density, "recall": recall, "lowest": lowest}
            found.append(Measured(case=case, seconds=ms / 1e3, dense=ms * speed_up / 1e3, baseline="cuDNN", **kept))
    return found


def speed(path: Path) -> None:
    """Write the PNG: each row of the table, the fastest method first."""
    text = section(SECTION)
    dense, found = dense_answers(text), rows(text)
    best = {row.method: max(one.speed_up for one in found if one.method == row.method) for row in found}
    found.sort(key=lambda row: (best[row.method], row.method, row.speed_up))
    figure = Figure(figsize=(9.0, 0.27 * len(found) + 1.5), dpi=160, layout="constrained")
    bars, table = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for at, row in enumerate(found):
        loses = int(row.inside.split()[0]) < KEEPS * dense
        color = LOSES if loses else DEFAULT
        bars.barh(at, row.speed_up, height=0.74, color=color)
        bars.text(row.speed_up + 0.2, at, f"{row.speed_up:.1f}", va="center", fontsize=8.5, weight="bold", color=INK)
        cells = (row.inside, row.end, row.kl, row.density)
        for x, text in zip(COLUMNS.values(), cells, strict=True):
            ink = LOSES if loses and text == row.inside else INK
            table.text(x, at, text, ha="right", va="center", fontsize=8.5, color=ink)
    for name, x in COLUMNS.items():
        table.text(x, len(found) - 0.25, name, ha="right", va="bottom", fontsize=8.5, color=INK, weight="bold")
    table.set_axis_off()
    names = [row.method if row.setting == "defaults" else f"{row.method}, {row.setting}" for row in found]
    bars.set_yticks(range(len(found)), names)
    bars.set_ylim(-0.6, len(found) + 0.9)
    bars.set_xticks([1, *range(5, round(max(best.values())) + 1, 5)])
    bars.set_xlim(0, 1.1 * max(best.values()))
    bars.axvline(1, color=INK, linewidth=0.8, linestyle="--")
    bars.set_xlabel("dense time / time; dashed: FlashAttention-4", fontsize=8.5, color=INK)
    bars.tick_params(labelsize=8.5, colors=INK, length=0)
    bars.grid(True, axis="x", color=GRID, linewidth=0.6)
    bars.set_axisbelow(True)
    for side in ("top", "right", "left"):
        bars.spines[side].set_visible(False)
    asked = found[0].inside.split("/")[1].strip()
    figure.suptitle(
        f"Attention of a prefill of {SECTION}, estimate included: speed-up over FlashAttention-4\n"
        f"{HARDWARE}; a trained model of 5.8M parameters, which finds {dense} of {asked} inside with dense attention",
        fontsize=9.5,
        color=INK,
    )
    kinds = {"keeps the answers inside the text": DEFAULT, "loses them": LOSES}
    handles = [Patch(color=color, label=text) for text, color in kinds.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, fontsize=8.5, frameon=False)
    figure.savefig(path, metadata={SOURCE: digest(SECTION)})


if __name__ == "__main__":
    speed(SPEED)
    bench_plot.draw(measured(), BENCH, "NVIDIA H200", {SOURCE: digest(*METHODS)})
