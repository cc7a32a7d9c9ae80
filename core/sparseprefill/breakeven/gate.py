"""Gates: who decides whether a call is worth running sparse, and where the table for this device comes from.

Devices that no table speaks of have a rule (`RULES`): cautious, so that a short prompt is not made slower. Where its
figures come from stands in docs/breakeven.md, with the commands that measured them.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from attrs import field, frozen

from sparseprefill.breakeven.points import DeviceKind, device_type, pairs
from sparseprefill.breakeven.table import UNKNOWN, BreakEven, Verdict, device_kind
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError, printed

OFF = "pass gate=None"
"""The way to have no gate, where nothing else is said: a server's configuration takes something else."""


def remedy(off: str = OFF) -> str:
    """The remedy for a gate that keeps calls dense. off: how to have none."""
    return f"{off} to run every call sparse"


def with_remedy(reason: str, off: str = OFF) -> str:
    """A gate's reason, and what to do about it, where the reason does not say that by itself."""
    return reason if remedy(off) in reason else f"{reason}; {remedy(off)}"


@frozen(kw_only=True)
class Unmeasured:
    """Judges calls by how long they are and how much dense attention would have to do.

    keys: tokens from which a call may run sparse. work: multiplications (pairs of tokens, times query heads, times head
    dimension, times batch rows) from which it may; None where nothing is known, and no call runs sparse.
    """

    keys: int
    work: float | None

    def judge(self, call: AttentionCall, why: str, off: str = OFF) -> Verdict:
        """The verdict. why: what is missing, which its reason begins with. off: see `remedy`. By sizes alone."""
        if call.window is not None:
            return Verdict(True)
        batch, heads, rows, width = call.q.shape
        keys = call.kv_len if call.q_offset is None else call.q_offset + rows
        if self.work is not None and keys >= self.keys and batch * heads * width * pairs(rows, keys) >= self.work:
            return Verdict(True, None, f"{why}: judged by {self}")
        how = f"measure a table with sparseprefill calibrate, or {remedy(off)}"
        return Verdict(False, None, f"{why}: dense by {self}; {how}")

    def __str__(self) -> str:
        if self.work is None:
            return "the built-in rule (nothing is known about such devices, so every call is dense)"
        return f"the built-in rule (sparse from {self.keys:,} keys and {self.work / 1e9:,.0f} billion multiplications)"


def _work(queries: int, keys: int, heads: int, width: int) -> float:
    return heads * width * pairs(queries, keys)


RULES = {
    "cpu": Unmeasured(keys=32768, work=_work(32768, 32768, 4, 64)),
    "cuda": Unmeasured(keys=32768, work=_work(2048, 65536, 32, 128)),
}
"""By the type of a device's kind. On AMD's GPUs ("rocm") nothing was measured."""
NOTHING_KNOWN = Unmeasured(keys=0, work=None)


TABLE = "SPARSEPREFILL_BREAKEVEN"
AUTO = "auto"


@runtime_checkable
class Gate(Protocol):
    """Anything that judges calls by their sizes: a BreakEven, or one of yours.

    A prompt is judged once, at its first chunk: `Route`. Where its length is known, its steps come as calls of their
    sizes, whose tensors hold no values; `prompt_lengths` tells the length.
    """

    __slots__ = ()

    def judge(self, call: AttentionCall, method: str) -> Verdict:
        """Judge whether the method of this name is worth it. Must not read values on the device."""
        ...


@frozen(eq=False)
class AutoGate:
    """Judges each call by the table for its device: the user's own, else the one that ships.

    Where there is none, or it has no figures for the call, a cautious rule decides (`Unmeasured`), and its verdicts say
    so. own: the table that the environment variable SPARSEPREFILL_BREAKEVEN names. off: see `remedy`.
    """

    own: BreakEven | None = None
    off: str = OFF
    _tables: dict[torch.device, BreakEven | str] = field(factory=dict, init=False, repr=False)
    _said: dict[str, None] = field(factory=dict, init=False, repr=False)

    def judge(self, call: AttentionCall, method: str) -> Verdict:
        """Judge whether a call gains from running sparse, by the table for its device: see `BreakEven.judge`."""
        device = call.q.device
        if device not in self._tables:
            self._tables[device] = self._find(device)
        found = self._tables[device]
        if isinstance(found, str):
            return self._by_rule(call, found)
        verdict = found.judge(call, method)
        self._said.setdefault(found.called(method))
        if verdict.ratio is None and verdict.reason:
            return self._by_rule(call, verdict.reason.removeprefix(UNKNOWN))
        return verdict

    def __str__(self) -> str:
        return "; ".join(self._said)

    def _by_rule(self, call: AttentionCall, why: str) -> Verdict:
        rule = RULES.get(device_type(call.q.device), NOTHING_KNOWN)
        self._said.setdefault(str(rule))
        return rule.judge(call, why, self.off)

    def _find(self, device: torch.device) -> BreakEven | str:
        """The table, or what is missing."""
        found = self.table(device)
        return f"no break-even table for {device_kind(device)}" if found is None else found

    def table(self, device: torch.device) -> BreakEven | None:
        """The table for a device, the user's own before the one that ships; None where there is none."""
        here = device_kind(device)
        return self.own if self.own is not None and self.own.device.like(here) else shipped(here)


GateChoice = BreakEven | Gate | str | Path | Literal[False] | None
"""A gate as users pass it: "auto", the path of a table, a BreakEven or another Gate; None or False for no gate."""


def gate_of(given: GateChoice) -> Gate | None:
    """The gate that a user means, None for none.

    "auto": the table that the environment variable SPARSEPREFILL_BREAKEVEN names, on its own kind of device; else the
    table that ships for the device of a call; else a cautious rule. The variable set to nothing means no gate.
    Raises ParameterError for a table that cannot be read, with the field that does not fit.
    """
    if given is None or given is False:
        return None
    if isinstance(given, str) and given == AUTO:
        path = os.environ.get(TABLE)
        if path is None:
            return AutoGate()
        try:
            return AutoGate(BreakEven.load(path)) if path.strip() else None
        except ParameterError as error:
            raise ParameterError(f"{TABLE}: {error}") from error
    if isinstance(given, str | Path):
        return BreakEven.load(given)
    if isinstance(given, Gate):
        return given
    raise ParameterError(f'gate is {printed(given)}: pass "auto", the path of a break-even table, a BreakEven, or None')


def shipped(device: DeviceKind) -> BreakEven | None:
    """The table that ships for a kind of device, or None."""
    kind = device.type if device.capability is None else "{}-{}.{}".format(device.type, *device.capability)
    file = files("sparseprefill.breakeven") / "tables" / f"breakeven-{kind}.json"
    return BreakEven.load(Path(str(file))) if file.is_file() else None
