"""BreakEven: measured times of dense and sparse attention on a device, and the sizes from which sparse pays."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import field, frozen

from sparseprefill import structure
from sparseprefill.breakeven.points import (
    GAIN,
    DeviceKind,
    HeadShape,
    Line,
    Sizes,
    device_type,
    from_length,
    lines,
    nearest,
    ratio_of,
)
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError

BELOW = "below break-even: dense attention is faster at this size"
BELOW_ALONE = f"{BELOW}, even for the executor alone"
ALONE = "judged by the executor alone, so a prompt too short for the method may run sparse"
LACKING = "the {table} has no figures of {method}; {command} measures it where it is installed: pass its table as gate"
UNKNOWN = "not gated: "
"""The beginning of a verdict's reason where a table knows nothing of a call."""


@frozen
class Verdict:
    """The word of a gate about a call.

    worth: whether to run it sparse. ratio: predicted time over dense attention's, None where nothing is known.
    reason: why it runs dense, or what the gate does not know; empty else.
    """

    worth: bool
    ratio: float | None = None
    reason: str = ""


@frozen(kw_only=True)
class BreakEven:
    """A table, as `sparseprefill calibrate` writes it: times by shape of heads and by length, on one kind of device.

    device: what was measured. shapes: the figures. versions, measured: software, and how it was measured, for people.
    """

    SCHEMA: ClassVar[structure.Schema] = structure.Schema("sparseprefill.breakeven", 1, "calibrate again")

    device: DeviceKind
    versions: Mapping[str, Any] = field(factory=dict, hash=False)
    measured: Mapping[str, Any] = field(factory=dict, hash=False)
    shapes: tuple[HeadShape, ...]
    _lines: dict[tuple[int, str], tuple[Line, ...]] = field(factory=dict, init=False, eq=False, repr=False)

    def judge(self, call: AttentionCall, method: str) -> Verdict:
        """Judge whether the method of this name is worth it for a call. By sizes alone: nothing on the device is read.

        A call on another kind of device, with a sliding window, or in a type that was not measured is no business of
        the table: it runs sparse, and the reason is in the verdict. A method without figures, such as a plugin's, is
        judged by the executor alone, which no mask of it can beat; the verdict says so, and what command measures it.
        """
        if call.window is not None:
            return Verdict(True)
        q = call.q
        here = device_kind(q.device)
        if not here.like(self.device):
            return Verdict(True, None, f"{UNKNOWN}the {self} has nothing for {here}")
        dtype = str(q.dtype).removeprefix("torch.")
        keys = call.kv_len if call.q_offset is None else call.q_offset + q.shape[2]
        sizes = Sizes(
            batch=q.shape[0], heads=q.shape[1], kv_heads=call.kv_heads, head_dim=q.shape[3], dtype=dtype,
            queries=q.shape[2], keys=keys,
        )  # fmt: skip
        shape = nearest(self.shapes, sizes, method)
        if shape is None:
            return Verdict(True, None, f"{UNKNOWN}the {self} has no figures for {dtype}")
        ratio = ratio_of(shape, self._along(shape, method), sizes)
        if ratio is not None and shape.knows(method):
            return Verdict(True, ratio) if ratio <= GAIN else Verdict(False, ratio, BELOW)
        lacking = LACKING.format(table=self, method=method, command=_command(method, sizes))
        if ratio is None:
            return Verdict(True, None, UNKNOWN + lacking)
        worth = ratio <= GAIN
        return Verdict(worth, ratio, f"{ALONE if worth else BELOW_ALONE}: {lacking}")

    def ratio(self, method: str, sizes: Sizes) -> float | None:
        """Predicted time of a method over dense attention's at these sizes; None where nothing is known."""
        shape = nearest(self.shapes, sizes, method)
        return None if shape is None else ratio_of(shape, self._along(shape, method), sizes)

    def length(self, method: str, shape: HeadShape) -> int | None:
        """The least prompt of a measured shape from which the method is worth it, in tokens; None if none is."""
        return from_length(self._along(shape, method))

    def to_json(self) -> str:
        """The text of a file that `load` reads."""
        return json.dumps(structure.unstructure(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def load(cls, source: str | Path) -> BreakEven:
        """Read a table from a JSON file; ParameterError names the file, the field, and what would do."""
        return structure.load(source, "break-even table", "pass a file of sparseprefill calibrate", cls.of)

    @classmethod
    def of(cls, facts: object) -> BreakEven:
        """Make a table from the content of such a file."""
        made: BreakEven = structure.structure(cls, facts)
        if not made.shapes:
            raise ParameterError("shapes is []: pass a list with at least one entry")
        return made

    def __str__(self) -> str:
        return f"break-even table of {self.device}"

    def called(self, *methods: str) -> str:
        """The table's name, for a report on methods: it says which of them it has no figures of."""
        lacking = [one for one in methods if not any(shape.knows(one) for shape in self.shapes)]
        return f"{self}, without figures of {', '.join(lacking)}" if lacking else str(self)

    def _along(self, shape: HeadShape, method: str) -> tuple[Line, ...]:
        key = (id(shape), method)
        if key not in self._lines:
            self._lines[key] = lines(shape, method)
        return self._lines[key]


def _command(method: str, sizes: Sizes) -> str:
    """The command that measures a method for such heads."""
    shape = f"--heads {sizes.heads} --kv-heads {sizes.kv_heads} --head-dim {sizes.head_dim} --dtype {sizes.dtype}"
    return f"sparseprefill calibrate --method {shlex.quote(method)} {shape}"


def device_kind(device: torch.device) -> DeviceKind:
    """The kind of a device at hand, by which tables are told apart."""
    if device.type != "cuda":
        return DeviceKind(type=device.type)
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return DeviceKind(type=device_type(device), capability=(major, minor), name=name)
