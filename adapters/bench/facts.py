"""What was measured, as plain data and as tables."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from attrs import asdict

from sparseprefill import __version__

from ..table import Column, Table
from .case import Case
from .measure import Row

EXTRA = "extra MiB"
"""Most memory held beyond inputs and result, in Markdown alone."""
LONG = {"mask": "estimate", "eff.": "efficiency"}
"""Heads in Markdown, where there is room."""
DROP = ("mask", "eff.", "rows", "recall", "lowest", "density")


def machine(device: torch.device) -> dict[str, Any]:
    """Device and versions."""
    found: dict[str, Any] = {"device": str(device), "name": platform.processor() or platform.machine()}
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {"name": torch.cuda.get_device_name(device), "cudnn": torch.backends.cudnn.version()}
        found["capability"] = list(torch.cuda.get_device_capability(device))
    for name in ("triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def about(device: torch.device, **settings: Any) -> dict[str, Any]:
    """What a JSON file of figures begins with: our version, device and software, and what was asked for."""
    return {"version": __version__, "machine": machine(device), **settings}


def fact(row: Row) -> dict[str, Any]:
    """One row: sizes, settings and figures; seconds and bytes."""
    case = row.case
    sizes = {"table": case.table, "what": case.name, **asdict(case.shape), "input": case.input}
    kind = "executor" if case.pipeline is None else "method"
    found = {"kind": kind, **sizes, "parameters": dict(case.parameters), "layers": case.layers, "gate": case.gate}
    found["error"] = row.error or None
    if row.error:
        return found
    return found | {
        **{"seconds": row.seconds, "dense_seconds": row.dense, "baseline": row.baseline},
        **{"estimate_seconds": row.estimate, "density": row.density, "speedup": row.speedup},
        **{"efficiency": row.efficiency, "recall": row.recall, "lowest_head_recall": row.lowest},
        **{"row_p1": row.row_p1, "row_lowest": row.row_lowest},
        **{"extra_bytes": row.extra, "parts": row.parts, "dense_because": row.note or None},
    }


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


COLUMNS: tuple[Column[Row], ...] = (
    Column("ms", lambda row: f"{row.seconds * 1e3:.4g}"),
    Column("mask", lambda row: "" if row.estimate is None else f"{row.estimate * 1e3:.3g}"),
    Column("density", lambda row: f"{row.density * 100:.3g}%"),
    Column("speed-up", lambda row: f"{row.speedup:.2f}"),
    Column("eff.", lambda row: f"{row.efficiency:.2f}"),
    Column("recall", lambda row: _share(row.recall)),
    Column("rows", lambda row: _share(row.row_p1)),
    Column("lowest", lambda row: _share(row.lowest)),
)
LABEL: Column[Row] = Column("what", lambda row: row.case.label)
TALL: Column[Row] = Column("what", lambda row: _tall(row.case))
BYTES: Column[Row] = Column(EXTRA, lambda row: "" if row.extra is None else f"{row.extra / 2**20:.0f}")


def _tall(case: Case) -> str:
    """The label, its parameters under the name."""
    name = f"{case.name}, gated" if case.gate else case.name
    return "\n".join([name, *(f"  {key}={value}" for key, value in case.parameters.items())])


def table(group: Sequence[Row]) -> Table:
    """Rows under one title, for a terminal."""
    columns = (TALL, *COLUMNS)
    return Table.of(columns, group, lambda row: row.error, title=title(group[0]), drop=DROP, remarks=remarks(group))


def title(row: Row) -> str:
    """What the rows of one table have in common: its name, the length, sizes and inputs."""
    case = row.case
    sizes = f"{case.shape.length:,} tokens, {case.shape}, inputs {case.input}"
    return f"{case.table}: {sizes}" if case.table else sizes


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that belong under one title, in the order of their coming."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(title(row), []).append(row)
    return list(found.values())


def dense_text(rows: Sequence[Row]) -> str:
    """Dense attention's kernel and times beside the rows."""
    times = [row.dense * 1e3 for row in rows if not row.error]
    if not times:
        return "nothing measured"
    kernel = next(row.baseline for row in rows if not row.error)
    span = f"{min(times):.2f}" if min(times) == max(times) else f"{min(times):.2f} to {max(times):.2f}"
    return f"dense ({kernel}): {span} ms beside the rows"


def remarks(rows: Sequence[Row]) -> list[str]:
    """What else is to be said of a table."""
    made = [dense_text(rows)]
    for row in rows:
        made += [f"{row.case.label} failed: {row.error}"] if row.error else []
        made += [f"{row.case.label} ran dense: {row.note}"] if row.note else []
    most = max(rows, key=lambda row: row.extra or 0)
    if most.extra:
        parts = f", in {most.parts} parts" if most.parts > 1 else ""
        made.append(f"most memory beyond inputs and result: {most.extra / 2**30:.2f} GiB, {most.case.label}{parts}")
    return made


def markdown(rows: Iterable[Row]) -> str:
    """Tables for docs/benchmarks.md."""
    columns = (LABEL, *COLUMNS, BYTES)
    made = [
        Table.of(columns, one, lambda row: row.error, title=title(one[0]), remarks=[dense_text(one)])
        for one in grouped(rows)
    ]
    return "\n".join(one.markdown(LONG) for one in made)
