"""Options of the benches, the run of their cases, and its rows as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from sparseprefill.adapters.cli import options, render
from sparseprefill.adapters.cli.group import CommandError, Stop, write
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.cli.render import Column, Table
from sparseprefill.adapters.cli.setup import Place

from sparseprefill.errors import ParameterError

from .case import Case
from .measure import Bench, Row
from .shape import Shape

LENGTHS = {"cuda": (32768, 131072), "cpu": (512, 1024)}
"""Lengths unless told otherwise."""
DROP = ("mask", "eff.", "rows", "recall", "lowest", "density")
"""Columns that a narrow terminal leaves out, in this order."""
NOTES = (
    "ms: median time of the whole call, by the device's clock; mask: the part of it until the mask is there. density: "
    "pairs computed / causal pairs. speed-up: dense attention's time, measured beside the row, / this time. eff.: "
    "density x speed-up. recall: share of the attention mass kept, exact, mean over heads and 64 sampled rows; "
    "rows: 1st percentile of these rows; lowest: lowest mean of a head."
)
ON_CPU = (
    " These are times on a CPU, where PyTorch's own fused attention runs over gathered keys. They say nothing about "
    "the kernels, which need a GPU."
)
COLUMNS: tuple[Column[Row], ...] = (
    Column("ms", lambda row: f"{row.seconds * 1e3:.4g}"),
    Column("mask", lambda row: "" if row.estimate is None else f"{row.estimate * 1e3:.3g}"),
    Column("density", lambda row: f"{row.density * 100:.3g}%"),
    Column("speed-up", lambda row: f"{row.speedup:.2f}"),
    Column("eff.", lambda row: f"{row.efficiency:.2f}"),
    Column("recall", lambda row: "" if row.recall is None else f"{row.recall:.3f}"),
    Column("rows", lambda row: "" if row.row_p1 is None else f"{row.row_p1:.3f}"),
    Column("lowest", lambda row: "" if row.lowest is None else f"{row.lowest:.3f}"),
)
Tokens = Annotated[list[int] | None, typer.Option(min=16, help="Tokens of the prompt; repeat for several.")]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KvHeads = Annotated[int, typer.Option(min=1, help="KV heads.")]
HeadDim = Annotated[int, typer.Option(min=32, help="Head dimension.")]
New = Annotated[
    list[int] | None,
    typer.Option(min=1, help="New tokens after cached ones: the last of --tokens; repeat for several."),
]
Page = Annotated[int, typer.Option(min=0, help="Tokens in a page of the KV cache; 0 for plain tensors.")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Timed runs of each case, fewer if they take long; the median counts.")
]
Seconds = Annotated[
    float, typer.Option(min=0.01, help="Time limit for all runs of a case, or of dense attention beside it.")
]
Seed = Annotated[int, typer.Option(min=0, max=options.SEEDS, help="Chooses inputs and masks.")]


def write_figures(path: Path | None, found: Any) -> None:
    """Write JSON to the file of --json, to standard output for ``-``, nowhere for None."""
    if str(path) == "-":
        render.write_json(found)
    elif path is not None:
        write("--json", path, render.to_json(found) + "\n")


def shape_of(place: Place, length: int, new: int | None = None, **sizes: Any) -> Shape:
    """The shape of a call of so many tokens; CommandError for one that cannot be or does not fit into memory."""
    try:
        shape = Shape(length=length, new=new, **sizes)
    except ParameterError as error:
        raise CommandError(str(error)) from error
    place.check_room("--tokens", length, shape.bytes_per_token, "a call of so many", least=16)
    place.check_room("--page", shape.page, shape.bytes_per_token, "a call of so many")
    return shape


def run(cases: Sequence[Case], bench: Bench, place: Place) -> tuple[Stop, list[Row]]:
    """Measure one layer's attention, case by case; Ctrl-C ends it with what there is."""
    rows: list[Row] = []
    with bars(len(cases)) as shown, place.threaded(), Stop() as stop:
        for case in cases:
            with shown.contender(str(case)) as progress:
                progress("measuring", 0, 1)
                rows.append(bench.measure(case))
    return stop, rows


def show(rows: Sequence[Row], place: Place) -> None:
    """Print a table for each title that rows have in common, and what the columns mean."""
    for group in grouped(rows):
        render.show(table(group))
    if rows:
        render.line(NOTES + (ON_CPU if place.device.type == "cpu" else ""), style="dim")


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that belong under one title, in the order of their coming."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(title(row), []).append(row)
    return list(found.values())


def title(row: Row) -> str:
    """What the rows of one table have in common: its name, the length, sizes and inputs."""
    case = row.case
    sizes = f"{case.shape.length:,} tokens, {case.shape}, inputs {case.input}"
    return f"{case.table}: {sizes}" if case.table else sizes


def table(group: Sequence[Row]) -> Table:
    """Rows under one title; the parameters of a method stand under its name."""

    def label(row: Row) -> str:
        name = f"{row.case.name}, gated" if row.case.gate else row.case.name
        return "\n".join([name, *(f"  {key}={value}" for key, value in row.case.parameters.items())])

    remarks = [dense_text(group)]
    for row in group:
        remarks += [f"{row.case.label} failed: {row.error}"] if row.error else []
        remarks += [f"{row.case.label} ran dense: {row.note}"] if row.note else []
    most = max(group, key=lambda row: row.extra or 0)
    if most.extra:
        parts = f", in {most.parts} parts" if most.parts > 1 else ""
        remarks.append(f"most memory beyond inputs and result: {most.extra / 2**30:.2f} GiB, {most.case.label}{parts}")
    columns = (Column("what", label), *COLUMNS)
    return Table.of(columns, group, lambda row: row.error, title=title(group[0]), drop=DROP, remarks=remarks)


def dense_text(rows: Sequence[Row]) -> str:
    """Dense attention's kernel and times beside the rows."""
    times = [row.dense * 1e3 for row in rows if not row.error]
    if not times:
        return "nothing measured"
    kernel = next(row.baseline for row in rows if not row.error)
    span = f"{min(times):.2f}" if min(times) == max(times) else f"{min(times):.2f} to {max(times):.2f}"
    return f"dense ({kernel}): {span} ms beside the rows"
