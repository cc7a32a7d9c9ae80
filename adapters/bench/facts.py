"""What was measured, as plain data and as Markdown."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from attrs import asdict

from sparseprefill import __version__

from .measure import Row

COLUMNS = ("what", "ms", "estimate", "density", "speed-up", "efficiency", "recall", "rows", "lowest")
EXTRA = "extra MiB"
"""Most memory held beyond inputs and result, in Markdown alone."""


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


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; all columns but the first are aligned to the right."""
    ruler = f"| --- |{' ---: |' * (len(heads) - 1)}"
    return [f"| {' | '.join(heads)} |", ruler, *(f"| {' | '.join(row)} |" for row in rows)]


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


def cells(row: Row) -> tuple[str, ...]:
    """One row of a table of `COLUMNS`."""
    if row.error:
        return (row.case.label, "failed", *[""] * (len(COLUMNS) - 2))
    return (
        row.case.label,
        f"{row.seconds * 1e3:.2f}",
        "" if row.estimate is None else f"{row.estimate * 1e3:.2f}",
        f"{row.density:.4f}",
        f"{row.speedup:.2f}",
        f"{row.efficiency:.2f}",
        *("" if one is None else f"{one:.3f}" for one in (row.recall, row.row_p1, row.lowest)),
    )


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


def markdown(rows: Iterable[Row]) -> str:
    """Tables for docs/benchmarks.md."""
    lines: list[str] = []
    for group in grouped(rows):
        lines += [f"### {title(group[0])}", "", f"{dense_text(group)}.", ""]
        lines += [*grid((*COLUMNS, EXTRA), ((*cells(row), _extra(row)) for row in group)), ""]
    return "\n".join(lines)


def _extra(row: Row) -> str:
    return "" if row.extra is None else f"{row.extra / 2**20:.0f}"
