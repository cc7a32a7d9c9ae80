"""The page of `compare`: its verdict, and how it stands in a browser on a screen and on a phone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.cli.page import verdict
from sparseprefill.adapters.evaluation.outcome import Contender, Divergence, Summary
from typer.testing import CliRunner

import sparseprefill as sp

MEASURE = Path(__file__).parent / "browser" / "measure.py"
STOCK = Summary(Contender("stock"), 2, seconds=4.0)


def row(name: str, kl: float, seconds: float, prompts: int = 2) -> Summary:
    near = Divergence(torch.tensor([kl], dtype=torch.float64), 0.9)
    return Summary(Contender(name, sp.build("dense")), prompts, inside=near, seconds=seconds)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([STOCK, row("a", 0.5, 1.0), row("b", 0.25, 2.0)], "b changes next tokens least: KL 0.2500, 90.0% of tokens"),
        ([STOCK, row("a", 0.5, 1.0), row("b", 0.25, 2.0)], "the same, prefill 2.00 times as fast."),
        ([STOCK, row("a", 0.5, 1.0, prompts=1)], "No method came through every prompt."),
        ([STOCK], "No method came through every prompt."),
    ],
)
def test_the_verdict_says_what_to_take_away(rows: list[Summary], said: str) -> None:
    assert said in verdict(rows)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    small = ("--tokens", "256", "--count", "1", "--greedy", "6", "--device", "cpu", "--threads", "1")
    methods = ("--method", "streaming", "--set", "streaming.window=16", "--method", "bfla")
    result = CliRunner().invoke(app, ["compare", *small, *methods, "--html", str(path)])
    assert result.exit_code == 0, result.output
    return path


def test_the_verdict_comes_first(page: Path) -> None:
    text = page.read_text()
    assert text.index("changes next tokens least") < text.index("<table")


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_browser(page: Path, width: int) -> None:
    pytest.importorskip(
        "PyQt6.QtWebEngineCore", reason="needs PyQt6-WebEngine, a headless Chromium", exc_type=ImportError
    )
    done = subprocess.run(
        [sys.executable, str(MEASURE), str(width), str(page)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["width"] == width
    assert facts["needed"] <= width
    assert facts["outside"] == []
    assert facts["images"] >= 5
    assert (facts["unnamed"], facts["broken"]) == (0, 0)
