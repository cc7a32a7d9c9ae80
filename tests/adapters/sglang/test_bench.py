"""The commands that time the backend: on a pool of SGLang's layout, and in SGLang's own engine."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.sglang.__main__ import app

from .engine import NEEDED, USUAL, environment


@pytest.mark.parametrize("cache", ["model", "fp8"])
def test_rows(cache: str, tmp_path: Path) -> None:
    small = ["--new", "160", "--cached", "100", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
    flags = ["--device", "cpu", "--dtype", "float32", "--rounds", "1", "--seconds", "0.01", "--in-place"]
    written = tmp_path / "rows.json"
    asked = [*small, *flags, "--cache", cache, "--method", "dense", "--method", "streaming", "--json", str(written)]
    result = CliRunner().invoke(app, asked)
    assert 0 == result.exit_code, result.output
    rows = json.loads(written.read_text())
    assert 8 == len(rows)
    for row in rows:
        assert "" == row["reasons"]
        assert row["milliseconds"] > 0
        assert row["method"] == "streaming" or row["difference"] < 1e-4


@NEEDED
@pytest.mark.slow
def test_a_model_in_the_engine(tmp_path: Path) -> None:
    """At a mask of every key its answers, and what the rows inside say, are those of SGLang's own attention; a turn
    finds the rest of its text in the radix cache."""
    more = {name: USUAL[name] for name in ("disable_cuda_graph", "disable_overlap_schedule", "max_total_tokens")}
    flags = ["--device", "cpu", "--dtype", "float32", "--own", "torch_native", "--engine", json.dumps(more)]
    small = ["--model", "embedded", "--tokens", "3072", "--turn", "512", "--texts", "1", "--inside", "1"]
    more_flags = ["--rounds", "1", "--method", "dense", "--json", str(tmp_path / "rows.json")]
    asked = ["-m", "lab.sglang.engine", *small, *flags, *more_flags]
    where = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, *asked], cwd=where, env=environment(), capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    stock, full = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert ("torch_native", "dense") == (stock["attention"], full["attention"])
    assert stock["answers"] == full["answers"]
    assert (None, 1.0) == (stock["density"], full["density"])
    assert full["inside"][0]["same"] > 0.99
    assert abs(full["inside"][0]["copies"] - stock["inside"][0]["copies"]) <= 2
    assert full["seconds"] > 0
    (turn,) = full["turns"]
    assert turn[0] > 0
    assert 3072 - 512 <= turn[1] < 3072
    assert "| dense | 3,072 |" in done.stdout
