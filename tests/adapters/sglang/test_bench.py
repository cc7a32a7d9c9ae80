"""The command that times the backend on a pool of SGLang's layout."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.sglang.__main__ import app


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
