"""One run each of the lab's tools that no other test runs, at the smallest size."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from lab import corrections, overhead, recall_cost, skip_share
from lab.bench.clock import Clock
from lab.bench.shape import ModelShape


def test_what_a_gated_model_costs() -> None:
    found = overhead.measure(2, 16, 2)
    assert (2, 16, 2) == (found.layers, found.tokens, found.rounds)
    assert "2 layers" in str(found)


def test_what_measuring_recall_costs() -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 128, "inner": 64, "heads": 4, "kv_heads": 2, "head_dim": 32}
    shape = ModelShape(**sizes, vocabulary=64, dtype="float32")
    found = recall_cost.measure(shape, 512, "streaming", Clock(torch.device("cpu"), rounds=2))
    assert 0 < found.density <= 1
    assert 0 < found.share


def test_skipping_by_its_share(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "256", "--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["skip_share", *sizes, "--shares", "0", "0.2"])
    skip_share.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {0.0} < {row["below"] for row in rows}
    assert all(0 <= row["share"] <= 1 and 0 <= row["error"] for row in rows)


def test_what_a_corrector_brings() -> None:
    found = corrections.Trial(tokens=256).read("streaming", corrections.METHODS["streaming"])
    assert len(corrections.CORRECTORS) == len(found.errors) == len(found.seconds)
    assert 0 < found.density < 1
