"""Pictures and sentences made from the tables of the pages: all that follows when a table has new figures.

Run `PYTHONPATH=tests python docs/tools/charts.py` in a clone. It draws the bars of README, docs/real-models-each.md and
docs/benchmarks.md, and writes the real model's figures into README's first table and each method's page.

Nothing is measured here, and no figure stands here. Each picture carries a digest of its rows, by which a test
sees that the page has changed since.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lab.bench import plot as bench_plot
from lab.bench.case import Case
from lab.bench.measure import Row as Measured
from lab.bench.shape import Shape

DOCS = Path(__file__).parents[1]
PAGES, SECTION = (DOCS / "benchmarks.md", DOCS / "benchmarks-more.md"), "131,072 tokens"
METHODS = tuple(f"methods: {tokens} tokens, 32 / 8 heads, d 128, bfloat16" for tokens in ("32,768", "131,072"))
ROWMAX = "rowmax by length"
"""Measured in another run, on another GPU and over another dense kernel."""
REAL_PAGE, REAL_MODEL = DOCS / "real-models-each.md", "Qwen2.5-Coder-1.5B-Instruct"
REAL, SPEED, BENCH = (DOCS / "pictures" / f"{name}.png" for name in ("real", "speed", "bench"))
SOURCE = "Source"
"""The PNG's field that holds the digest."""
HARDWARE = "NVIDIA H200, bfloat16"
COLUMNS = {"inside": 0.2, "end": 0.46, "KL": 0.74, "density": 1.0}
"""What stands beside the bars, and where each column ends."""
KEEPS = 0.98
"""Share of dense's answers inside that a method keeps that does not lose them."""
DEFAULT, LOSES, INK, GRID = "#10365f", "#c97b63", "#333333", "#e6e6e6"
ATTENTION = "#a9c9e2"
KEPT = {"copies": 0.22, "facts": 0.48, "pairs": 0.74, "KL": 1.0}
"""What stands beside a real model's bars, and where each column ends."""
ON_H100 = frozenset({"flexprefill", "sample-attention", "share-prefill", "kascade", "anchor-attention"})
"""Methods whose rows at the shortest length are of an H100."""
OWN_LINE = re.compile(r"^\*\*On a real model\*\*.*?\n\n", re.M | re.S)
"""The paragraph of a method's page about the real model."""
README_ROW = re.compile(
    r"^\| (?P<name>\[?`(?P<method>[\w-]+)`(?P<more>[^|]*)) \|(?: [\d.]+ [%x] \|){3} [\d.]+ \|.*\|$", re.M
)


class Row(NamedTuple):
    """One method at one setting, as the table has it."""

    method: str
    setting: str
    inside: str
    end: str
    kl: str
    density: str
    speed_up: float


class Real(NamedTuple):
    """One method at one setting on a real model, as docs/real-models-each.md has it. marked: its row is in bold. texts:
    that it was measured on."""

    method: str
    setting: str
    marked: bool
    pairs: str
    copies: str
    facts: str
    kl: str
    attention: float
    prefill: float
    texts: str

    @property
    def label(self) -> str:
        """Method and setting, in lines that fit beside a bar."""
        name = self.method if self.setting == "defaults" else f"{self.method}, {self.setting}"
        return "\n".join(wrap(name, 28))

    @property
    def kept(self) -> float:
        """The smaller one of the shares of copies and facts that are kept, in per cent."""
        return min(percent(self.copies), percent(self.facts))


def percent(text: str) -> float:
    """The number in front of a per cent sign."""
    return float(text.rstrip(" %"))


def real_lengths() -> list[str]:
    """The lengths of the real model's sections, as their headings have them."""
    return re.findall(rf"^## {re.escape(REAL_MODEL)}, ([\d,]+) tokens$", REAL_PAGE.read_text(encoding="utf-8"), re.M)


def real_section(tokens: str) -> str:
    """The section of the real model at a length, subsections included."""
    text = REAL_PAGE.read_text(encoding="utf-8")
    return text.split(f"\n## {REAL_MODEL}, {tokens} tokens\n", 1)[1].split("\n## ", 1)[0]


def real_rows(tokens: str) -> list[Real]:
    """The rows at the defaults, and those in bold, of all tables of the section that have times; the last of a setting.

    The table of a subsection may name settings by parameters alone: its method is then the heading's first word.
    """
    found: dict[tuple[str, str], Real] = {}
    texts = ""
    for part in real_section(tokens).split("\n### "):
        said = re.search(r"(\d+) texts", part)
        texts = said[1] if said else texts
        head, *lines = [line for line in part.splitlines() if line[:1] == "|"] or [""]
        names = [cell.strip(" `") for cell in head.strip("| ").split("|")]
        if not {"pairs", "copies", "facts", "KL", "attention", "prefill"} <= set(names):
            continue
        title, keys = part.splitlines()[0], names[: names.index("pairs")]
        for line in lines[1:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            row = dict(zip(names, (cell.strip("*` ") for cell in cells), strict=True))
            if "method" in row:
                method, setting = row["method"], row["setting"]
            elif row[keys[0]].startswith("defaults"):
                continue
            else:
                method, _, what = title.partition(" in ")
                setting = ", ".join([what, *(f"{key}={row[key]}" for key in keys)])
            marked = cells[0].startswith("**")
            if method == "dense" or not (marked or setting == "defaults"):
                continue
            shares = (row[name].split(" (")[0] for name in ("pairs", "copies", "facts", "KL"))
            times = float(row["attention"]), float(row["prefill"])
            found[method, setting] = Real(method, setting, marked, *shares, *times, texts)
    return list(found.values())


def real_digest() -> str:
    """Of all rows that the picture of the real model shows."""
    return sha256(repr([(tokens, real_rows(tokens)) for tokens in real_lengths()]).encode()).hexdigest()


def about(row: Real | None, tokens: str) -> str:
    """The line of a method's own page; None for one that has no row."""
    if row is None:
        line = f"**On a real model** it was not measured ([those that were](../{REAL_PAGE.name}))."
    else:
        gpu = "one H100" if row.method in ON_H100 else "one H200"
        at = f"Qwen2.5-Coder-1.5B, {tokens} tokens, {gpu}, defaults"
        line = (
            f"**On a real model** ([table](../{REAL_PAGE.name}); {at})"
            f" it keeps {row.copies} of what dense attention copies and {row.facts} of its facts, at {row.pairs} of the"
            f" pairs and a KL of {row.kl}. Attention is {row.attention:.2f} times as fast as FlashAttention-4, the"
            f" whole prefill {row.prefill:.2f} times as fast as the stock model's."
        )
    return "\n".join(wrap(line, 120, break_long_words=False, break_on_hyphens=False)) + "\n\n"


def with_line(page: str, line: str) -> str:
    """A method's page with the line in place of the one that it has, or ahead of what it says of other models."""
    if OWN_LINE.search(page):
        return OWN_LINE.sub(lambda _: line, page, count=1)
    return re.sub(r"^(?=\*\*|## Parameters)", lambda _: line, page, count=1, flags=re.M)


def with_rows(readme: str, rows: list[Real]) -> str:
    """README with the rows' figures in its first table, in the rows that stand there."""
    best = {(row.method, row.setting == "defaults"): row for row in rows}

    def made(found: re.Match[str]) -> str:
        row = best.get((found["method"], "," not in found["more"]))
        if row is None:
            raise ValueError(
                f"README's row {found['name']} has none in {REAL_PAGE.name}: take it out, or mark one in bold"
            )
        kept = f"{row.pairs} | {row.copies} | {row.facts} | {row.kl}"
        return f"| {found['name']} | {kept} | {row.attention:.2f} x | {row.prefill:.2f} x |"

    return README_ROW.sub(made, readme)


def section(heading: str) -> str:
    """What stands below the heading, up to the next one of its level."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.split(r"\n#{2,3} ", text.split(f"\n### {heading}\n", 1)[1], maxsplit=1)[0]


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
        for length, dense, ms, density, recall in cells(
            section(ROWMAX), "tokens", "dense, ms", "rowmax, ms", "density", "recall"
        ):
            if length == heading.split()[1]:
                case = Case(table="methods", name="rowmax *", shape=Shape(length=tokens))
                kept = {"density": float(density.rstrip(" %")) / 100, "recall": float(recall)}
                times = {"seconds": float(ms) / 1e3, "dense": float(dense) / 1e3}
                found.append(Measured(case=case, baseline="FlashAttention-4 on an H100 (*)", **times, **kept))
    return sorted(found, key=lambda row: row.case.name)


def real(path: Path) -> None:
    """Write the PNG of the real model: for each length a bar for the attention, and in it one for the whole prefill."""
    groups = {tokens: sorted(real_rows(tokens), key=lambda row: (row.kept, row.prefill)) for tokens in real_lengths()}
    counts = [len(rows) + 2 for rows in groups.values()]
    figure = Figure(figsize=(9.0, 0.27 * sum(counts) + 1.5), dpi=160, layout="constrained")
    axes = figure.subplots(len(groups), 2, squeeze=False, sharex="col", width_ratios=(3, 2), height_ratios=counts)
    widest = max(row.attention for rows in groups.values() for row in rows)
    for (bars, table), (tokens, rows) in zip(axes, groups.items(), strict=True):
        for at, row in enumerate(rows):
            bars.barh(at, row.attention, height=0.74, color=ATTENTION)
            bars.barh(at, row.prefill, height=0.34, color=DEFAULT)
            end = max(row.attention, row.prefill) + 0.08
            bars.text(end, at, f"{row.attention:.2f}, {row.prefill:.2f}", va="center", fontsize=8, color=INK)
            beside = (row.copies, row.facts, row.pairs, row.kl)
            for (name, x), text in zip(KEPT.items(), beside, strict=True):
                if name in ("copies", "facts"):
                    lost = min(1.0, max(0.0, 1 - percent(text) / 100))
                    table.add_patch(
                        Rectangle((x - 0.23, at - 0.5), 0.25, 1, color=LOSES, alpha=0.85 * lost, linewidth=0)
                    )
                table.text(x, at, text, ha="right", va="center", fontsize=8.5, color=INK)
        texts = " or ".join(dict.fromkeys(row.texts for row in rows))
        dress_bars(bars, table, [row.label for row in rows], f"{tokens} tokens, {texts} texts")
        bars.set_xlim(0, 1.25 * widest)
    axes[-1][0].set_xlabel("dense time / time; dashed: dense", fontsize=8.5, color=INK)
    figure.suptitle(
        f"{REAL_MODEL}, bfloat16, one H100 or H200: what is gained, and what is kept of dense's copies and facts",
        fontsize=9.5,
        color=INK,
    )
    kinds = {
        "attention alone, estimate included, over FlashAttention-4": ATTENTION,
        "whole prefill in transformers, over the stock model": DEFAULT,
    }
    handles = [Patch(color=color, label=text) for text, color in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    figure.savefig(path, metadata={SOURCE: real_digest()})


def dress_bars(bars: Axes, table: Axes, names: list[str], title: str) -> None:
    """Names of rows and columns, and the look of a group of bars with a table beside it."""
    for name, x in KEPT.items():
        table.text(x, len(names) - 0.4, name, ha="right", va="bottom", fontsize=8.5, color=INK, weight="bold")
    table.set_axis_off()
    for axis in (bars, table):
        axis.set_ylim(-0.6, len(names) + 0.6)
    table.set_xlim(0, 1.05)
    bars.text(0, len(names) - 0.35, title, va="bottom", fontsize=8.5, color=INK, weight="bold")
    bars.set_yticks(range(len(names)), names)
    bars.plot([1, 1], [-0.6, len(names) - 0.45], color=INK, linewidth=0.8, linestyle="--")
    bars.tick_params(labelsize=8.5, colors=INK, length=0)
    bars.grid(True, axis="x", color=GRID, linewidth=0.6)
    bars.set_axisbelow(True)
    for side in ("top", "right", "left"):
        bars.spines[side].set_visible(False)


def lines() -> dict[Path, str]:
    """README and the methods' pages, as they should be: with the real model's figures."""
    tokens = real_lengths()[0]
    rows = real_rows(tokens)
    own = {row.method: row for row in rows if row.setting == "defaults"}
    texts = {page: page.read_text(encoding="utf-8") for page in sorted((DOCS / "methods").glob("*.md"))}
    made = {
        page: with_line(text, about(own.get(page.stem), tokens)) for page, text in texts.items() if page.stem != "dense"
    }
    readme = DOCS.parent / "README.md"
    return {**made, readme: with_rows(readme.read_text(encoding="utf-8"), rows)}


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
    for page, text in lines().items():
        page.write_text(text, encoding="utf-8")
    real(REAL)
    speed(SPEED)
    bench_plot.draw(measured(), BENCH, "NVIDIA H200", {SOURCE: digest(*METHODS, ROWMAX)})
