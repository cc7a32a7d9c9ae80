"""Gates: who decides whether a call is worth running sparse, and where the table for this device comes from."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from attrs import field, frozen

from sparseprefill.breakeven.table import UNKNOWN, BreakEven, Verdict, device_kind
from sparseprefill.breakeven.unmeasured import rule_for
from sparseprefill.errors import ParameterError, printed

if TYPE_CHECKING:
    import torch

    from sparseprefill.breakeven.points import DeviceKind
    from sparseprefill.call import AttentionCall

TABLE = "SPARSEPREFILL_BREAKEVEN"
AUTO = "auto"


@runtime_checkable
class Gate(Protocol):
    """Anything that judges calls by their sizes: a BreakEven, or one of yours."""

    __slots__ = ()

    def judge(self, call: AttentionCall, method: str) -> Verdict:
        """Whether the method of this name is worth it. Must not read values on the device."""
        ...


@frozen(eq=False)
class AutoGate:
    """Judges each call by the table for its device: the user's own, else the one that ships.

    Where there is none, or it has no figures for the call, a cautious rule decides (`Unmeasured`), and its verdicts say
    so. own: the table that the environment variable SPARSEPREFILL_BREAKEVEN names.
    """

    own: BreakEven | None = None
    _tables: dict[torch.device, BreakEven | str] = field(factory=dict, init=False, repr=False)
    _said: dict[str, None] = field(factory=dict, init=False, repr=False)

    def judge(self, call: AttentionCall, method: str) -> Verdict:
        """Whether a call gains from running sparse, by the table for its device: see `BreakEven.judge`."""
        device = call.q.device
        if device not in self._tables:
            self._tables[device] = self._find(device)
        found = self._tables[device]
        if isinstance(found, str):
            return self._by_rule(call, found)
        verdict = found.judge(call, method)
        self._said.setdefault(str(found))
        if verdict.ratio is None and verdict.reason:
            return self._by_rule(call, verdict.reason.removeprefix(UNKNOWN))
        return verdict

    def __str__(self) -> str:
        return "; ".join(self._said)

    def _by_rule(self, call: AttentionCall, why: str) -> Verdict:
        rule = rule_for(call.q.device.type)
        self._said.setdefault(str(rule))
        return rule.judge(call, why)

    def _find(self, device: torch.device) -> BreakEven | str:
        """The table, or what is missing."""
        here = device_kind(device)
        if self.own is not None and (self.own.device.type, self.own.device.capability) == (here.type, here.capability):
            return self.own
        found = shipped(here)
        return f"no break-even table for {here}" if found is None else found


GateChoice = BreakEven | Gate | str | Path | Literal[False] | None
"""What users pass: "auto", the path of a table, a BreakEven or another Gate; None or False for no gate."""


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
