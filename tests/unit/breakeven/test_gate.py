"""Gates: what users may pass, and which table serves a device."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import make
from helpers.tables import from_length, point, shape_of, table
from sparseprefill.breakeven import gate as gates
from sparseprefill.breakeven.gate import AutoGate, Gate, gate_of, shipped
from sparseprefill.breakeven.points import DeviceKind
from sparseprefill.breakeven.table import BreakEven


def test_gates_that_users_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = from_length(512)
    path = tmp_path / "one.json"
    path.write_text(made.to_json(), encoding="utf-8")
    monkeypatch.delenv("SPARSEPREFILL_BREAKEVEN", raising=False)
    assert gate_of(None) is None
    assert gate_of(False) is None
    assert gate_of(made) is made
    assert (made, made) == (gate_of(str(path)), gate_of(path))
    automatic = gate_of("auto")
    assert isinstance(automatic, AutoGate)
    assert automatic.own is None
    assert isinstance(made, Gate)
    monkeypatch.setenv("SPARSEPREFILL_BREAKEVEN", str(path))
    named = gate_of("auto")
    assert isinstance(named, AutoGate)
    assert made == named.own
    for nothing in ("", "  "):
        monkeypatch.setenv("SPARSEPREFILL_BREAKEVEN", nothing)
        assert gate_of("auto") is None
    monkeypatch.setenv("SPARSEPREFILL_BREAKEVEN", str(tmp_path / "none"))
    with pytest.raises(sp.ParameterError, match="SPARSEPREFILL_BREAKEVEN: break-even table"):
        gate_of("auto")


def test_the_tables_that_ship() -> None:
    for nothing in (DeviceKind(type="cuda", capability=(1, 0)), DeviceKind(type="cuda"), DeviceKind(type="meta")):
        assert shipped(nothing) is None
    names = {"breakeven-cpu.json", "breakeven-cuda-9.0.json"}
    assert names == {one.name for one in (Path(gates.__file__).parent / "tables").glob("*.json")}
    for kind in (DeviceKind(type="cpu"), DeviceKind(type="cuda", capability=(9, 0))):
        found = shipped(kind)
        assert found is not None
        assert (kind.type, kind.capability) == (found.device.type, found.device.capability)


def test_a_table_of_your_own_goes_before_those_that_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DeviceKind] = []
    here = DeviceKind(type="cuda", capability=(9, 0))
    monkeypatch.setattr(gates, "device_kind", lambda device: here)
    monkeypatch.setattr(gates, "shipped", asked.append)
    own = table(shape_of(point(8, 8)), kind="cuda", capability=(9, 0))
    assert AutoGate(own)._find(torch.device("cpu")) is own
    assert [] == asked
    for other in (evolve(own, device=DeviceKind(type="cuda", capability=(8, 0))), None):
        AutoGate(other)._find(torch.device("cpu"))
    assert [here] * 2 == asked


def test_a_table_is_looked_for_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.device] = []
    own = from_length(512, heads=2, kv_heads=1)

    def find(self: AutoGate, device: torch.device) -> BreakEven:
        looked.append(device)
        return own

    monkeypatch.setattr(AutoGate, "_find", find)
    automatic = AutoGate()
    assert "" == str(automatic)
    verdicts = [automatic.judge(make(64), "streaming") for _ in range(3)]
    assert [torch.device("cpu")] == looked
    assert [own.judge(make(64), "streaming")] * 3 == verdicts
    assert str(own) == str(automatic)
