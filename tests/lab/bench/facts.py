"""What was measured, and where, as plain data."""

from __future__ import annotations

import platform
from typing import Any

import torch
from attrs import asdict
from sparseprefill.adapters.calibration.measure import versions

from sparseprefill import __version__
from sparseprefill.breakeven.table import device_kind

from .measure import Row


def machine(device: torch.device) -> dict[str, Any]:
    """Device and versions."""
    found: dict[str, Any] = {"device": str(device), "name": platform.processor() or platform.machine()}
    found |= {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {"name": torch.cuda.get_device_name(device), "cudnn": torch.backends.cudnn.version()}
        kind = device_kind(device)
        found |= {"type": kind.type, "capability": list(kind.capability or ())}
    return found | versions("triton", "transformers")


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
