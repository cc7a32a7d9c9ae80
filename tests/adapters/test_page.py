"""The page of `compare`: its verdict, and how it stands in a browser on a screen and on a phone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.cli.results import verdict
from sparseprefill.adapters.evaluation.outcome import Contender, Divergence, Summary
from typer.testing import CliRunner

import sparseprefill as sp

MEASURE = Path(__file__).parent / "browser" / "measure.py"
STOCK = Summary(Contender("stock"), 2, seconds=4.0)
ASKED = Summary(Contender("stock"), 2, seconds=4.0, answers_inside=(50, 52), answers=(10, 10))


def row(name: str, kl: float, seconds: float, inside: int = 0, end: int = 0, prompts: int = 2) -> Summary:
    near = Divergence(torch.tensor([kl], dtype=torch.float64), 0.9)
    contender = Contender(name, sp.build("dense"))
    return Summary(contender, prompts, inside=near, seconds=seconds, answers_inside=(inside, 52), answers=(end, 10))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([STOCK, row("a", 0.5, 1.0), row("b", 0.25, 2.0)], "b changes next tokens least: KL 0.2500, 90.0% of tokens"),
        ([STOCK, row("a", 0.5, 1.0), row("b", 0.25, 2.0)], "the same, prefill 2.00 times as fast."),
        ([STOCK, row("a", 0.5, 1.0, prompts=1)], "No method came through every prompt."),
        ([STOCK], "No method came through every prompt."),
        ([ASKED, row("a", 0.5, 1.0, 20, 10), row("b", 0.5, 2.0, 48, 10)], "No method keeps 98% of the answers"),
        (
            [ASKED, row("a", 0.5, 1.0, 20, 10), row("b", 0.5, 2.0, 48, 10)],
            "b keeps most, 48 of its 50 inside and 10 of",
        ),
        ([ASKED, row("a", 0.5, 1.0, 20, 10), row("b", 0.5, 2.0, 49, 10)], "b keeps the answers that dense attention"),
        ([ASKED, row("a", 0.5, 1.0, 20, 10), row("b", 0.5, 2.0, 49, 10)], "as fast, and no other method does."),
        ([ASKED, row("a", 0.5, 1.0, 50, 10), row("b", 0.5, 2.0, 49, 10)], "a keeps the answers that dense attention"),
        ([ASKED, row("a", 0.5, 1.0, 50, 10), row("b", 0.5, 2.0, 49, 10)], "prefill 4.00 times as fast; so do 1 more."),
        ([ASKED, row("a", 0.5, 1.0, 50, 9)], "No method keeps 98% of the answers"),
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
        [sys.executable, str(MEASURE), str(page), str(width)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["width"] == width
    assert facts["needed"] <= width
    assert facts["outside"] == []
    assert facts["images"] >= 5
    assert (facts["unnamed"], facts["broken"]) == (0, 0)
