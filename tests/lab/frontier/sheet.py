"""A table of what methods do to a real model, from files of ``--json``: ``python -m lab.frontier.sheet``.

Copies and facts are told as shares of what the model's own attention gets right, KL and shares with 95 % intervals over
the prompts that were read: Student's t, the standard error by leaving out one prompt after the other (jackknife).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from scipy.stats import t as student
from sparseprefill.adapters.cli import render
from sparseprefill.adapters.cli.group import CommandError
from torch import Tensor

from lab.files import command
from sparseprefill import structure

HEADS = ("method", "setting", "pairs", "copies", "facts", "KL", "99 %", "NLL", "attention", "prefill")
Point = Mapping[str, Any]

app = command("Make the table of a page out of what the frontier wrote on natural texts.")


@app.callback(invoke_without_command=True)
def sheet(
    paths: Annotated[list[Path], typer.Argument(help="Files of --json; points of one length and model go together.")],
) -> None:
    """Make the table of a page out of what the frontier wrote on natural texts."""
    found: dict[str, list[Point]] = {}
    for path in paths:
        try:
            read = structure.parsed(structure.read(path, 1 << 28))
            for one in read["points"]:
                found.setdefault(f"{Path(read['model']).name}, {one['tokens']:,} tokens", []).append(one)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CommandError(f"{path}: {error!r}: pass what the frontier's --json FILE wrote") from error
    for title, points in found.items():
        render.line(f"### {title}\n")
        for line in table(points):
            render.line(line)
        render.line("")


def table(points: Sequence[Point]) -> list[str]:
    """The rows as Markdown, dense's figures above them."""
    done = [one for one in points if not one["error"]]
    if not done:
        raise CommandError("no setting came through: there is nothing to tell")
    first = done[0]
    dense = [f"{first['inside']['dense_right']} of {first['inside']['asked']} facts"]
    if first["copies"]:
        dense.insert(0, f"{first['copies']['dense_right']:,} of {first['copies']['asked']:,} restated tokens")
    seconds = sum(one["dense_seconds"] for one in first["prompts"]) / len(first["prompts"])
    about = f"{len(first['prompts'])} texts. Dense: {', '.join(dense)}, {seconds:.3f} s a prefill."
    rows = [f"| {' | '.join(HEADS)} |", f"|---|---|{'---:|' * (len(HEADS) - 2)}"]
    unlike = {str((one["method"], one["setting"])): one for one in done}.values()
    return [about, "", *rows, *(f"| {' | '.join(_cells(one))} |" for one in unlike)]


def _cells(one: Point) -> list[str]:
    each, attention = one["prompts"], one["attention"]
    near = one["inside"]
    return [
        f"`{one['method']}`",
        one["setting"],
        f"{one['density']:.1%}",
        _share(each, "copies") if one["copies"] else "",
        _share(each, "facts"),
        _mean(each, "kl"),
        f"{near['high']:.3f}" if near["high"] < 1 else f"{near['high']:.2f}",
        f"{near['nll_ratio']:.3f}",
        f"{attention['speedup']:.2f}" if attention else "",
        f"{one['prefill_speedup']:.2f}" if one["prefill_speedup"] else "",
    ]


def _share(each: Sequence[Point], name: str) -> str:
    """What is left of dense's right ones, over all prompts."""
    right, dense = (_values(each, key) for key in (name, f"dense_{name}"))
    if not dense.sum():
        return ""
    return _with(lambda rows: right[rows].sum(-1) / dense[rows].sum(-1).clamp(min=1), len(each), "{:.1%}")


def _mean(each: Sequence[Point], name: str) -> str:
    values = _values(each, name)
    return _with(lambda rows: values[rows].mean(-1), len(each), "{:.4f}" if values.mean() < 0.1 else "{:.3f}")


def _values(each: Sequence[Point], name: str) -> Tensor:
    return torch.tensor([one[name] or 0 for one in each], dtype=torch.float64)


def _with(figure: Callable[[Tensor], Tensor], count: int, words: str) -> str:
    """A figure of prompts by index, and its interval."""
    told = words.format(float(figure(torch.arange(count))))
    if count < 2:
        return told
    low, high = interval(figure, count)
    return f"{told} ({words.format(max(0.0, low))} to {words.format(high)})"


def interval(figure: Callable[[Tensor], Tensor], count: int) -> tuple[float, float]:
    """The 95 % interval of a figure of `count` prompts, two and more, ``figure(indices [..., n]) -> [...]``."""
    every = torch.arange(count)
    without = figure(torch.stack([every[every != one] for one in every]))  # [count]
    error = math.sqrt((count - 1) * float(without.var(correction=0)))
    half, middle = float(student.ppf(0.975, count - 1)) * error, float(figure(every))
    return middle - half, middle + half


if __name__ == "__main__":
    app()
