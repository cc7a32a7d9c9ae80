"""Other choices by the same scores, on the embedded model: `python -m lab.by_score`, run in tests, prints them.

Of two methods, at two densities each: the method itself, and its scores with a threshold relative to the largest, with
an even budget, with one that falls, and with these where scores are weighted by values. It writes configuration files
and runs `lab.frontier` with them. The settings are those whose density comes closest to the method's own on
other texts, those of ``--seed 1000``. An argument is another seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import frozen
from typer.testing import CliRunner

from lab.frontier.app import app

Choice = tuple[str, Sequence[Mapping[str, Any]]]


@frozen(kw_only=True)
class Subject:
    """A method: what `frontier` is told of its own settings, and parameters at which it keeps every key.

    ends: tiles that stay in any case, as with the method itself. budgets: of (relative, even, falling) the settings
    closest to each of the `tried`.
    """

    set: str
    parameter: str
    tried: Sequence[float]
    every: Mapping[str, Any]
    ends: Mapping[str, int]
    closest: Sequence[tuple[float, float, float]]


SUBJECTS: Mapping[str, Subject] = {
    "xattention": Subject(
        set="stride=16",
        parameter="threshold",
        tried=(0.95, 0.98),
        every={"stride": 16, "block": 64, "threshold": 1.0},
        ends={"sink": 1, "local": 0},
        closest=((0.012, 0.06, 0.071), (0.004, 0.1, 0.115)),
    ),
    "bfla": Subject(
        set="group=16",
        parameter="keep_mass",
        tried=(0.9, 0.98),
        every={"block": 64, "group": 16, "tile": 64, "score_norm": "mean", "keep_mass": 1.0},
        ends={"sink": 1, "local": 4},
        closest=((0.025, 0.04, 0.055), (0.0035, 0.09, 0.11)),
    ),
}
BETA = 0.2
COMMAND = ("--tokens", "8192", "--texts", "1", "--questions", "4", "--rounds", "1", "--threads", "1")


def choices(subject: Subject, closest: tuple[float, float, float]) -> Iterator[Choice]:
    """What a row is called, and its refiners."""
    relative, even, falling = closest
    values = {"name": "value-weights", "beta": BETA}
    threshold = {"name": "relative-threshold", "share": relative, **subject.ends}
    budget = {"name": "position-decay", "share": even, "decay": 1.0, **subject.ends}
    decay = {**budget, "share": falling, "decay": 0.7}
    yield f"relative, share={relative:g}", [threshold]
    yield f"even budget, share={even:g}", [budget]
    yield f"falling budget, share={falling:g}", [decay]
    yield f"values, relative, share={relative:g}", [values, threshold]
    yield f"values, falling budget, share={falling:g}", [values, decay]


def rows(method: str, folder: Path, *options: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each setting of a method its name and what `frontier` found, sorted by the settings of the method itself."""
    subject = SUBJECTS[method]
    names: dict[str | None, tuple[float, str]] = {}
    configs: list[str] = []
    for tried, closest in zip(subject.tried, subject.closest, strict=True):
        for name, refiners in choices(subject, closest):
            path = folder / f"{method}-{len(names)}.json"
            table = {"name": path.stem, "method": method, "parameters": subject.every, "refiners": list(refiners)}
            path.write_text(json.dumps(table))
            names[str(path)] = (tried, name)
            configs += ["--config", str(path)]
    written = folder / "found.json"
    own = [
        "--set",
        f"{method}.{subject.set}",
        "--try",
        f"{method}.{subject.parameter}={','.join(map(str, subject.tried))}",
    ]
    ran = CliRunner().invoke(app, ["--method", method, *own, *configs, *options, "--json", str(written)])
    if ran.exit_code:
        raise SystemExit(ran.output)
    found: list[tuple[float, str, dict[str, Any]]] = []
    for point in json.loads(written.read_text())["points"]:
        parameters = point["parameters"]
        own_setting = parameters.get(subject.parameter, 0.0)
        tried, name = names.get(parameters.get("config"), (own_setting, f"{subject.parameter}={own_setting:g}"))
        found.append((tried, name, point))
    yield from ((name, point) for _, name, point in sorted(found, key=lambda one: one[0]))


def table(*options: str) -> str:
    """A row for each setting; options: of `frontier`."""
    lines = ["| Method | Choice | Density | Answers | KL | Worst | Recall |", "|---" * 7 + "|"]
    for method in SUBJECTS:
        with TemporaryDirectory() as folder:
            for name, one in rows(method, Path(folder), *options):
                figures = (
                    f"{one['right']} / {one['asked']} | {one['kl']:.5f} | {one['worst_kl']:.4f} | {one['recall']:.3f}"
                )
                lines.append(f"| {method} | {name} | {one['density']:.3f} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(*COMMAND, *(("--seed", sys.argv[1]) if sys.argv[1:] else ())))  # noqa: T201
