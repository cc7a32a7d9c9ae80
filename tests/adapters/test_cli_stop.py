"""Ctrl-C: what was measured is shown, what was written is named, and the exit code is 130."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparseprefill.adapters.calibration import measure
from sparseprefill.adapters.calibration.fit import ModelReadings
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.cli.group import wrote
from sparseprefill.adapters.evaluation import comparison
from typer.testing import CliRunner, Result

from helpers.terminal import Terminal
from lab.bench.app import app as bench
from lab.bench.first_token import app as first_token
from lab.bench.measure import Bench
from lab.bench.ttft import Prefill
from lab.vllm.app import app as vllm_bench
from lab.vllm.several import Several
from sparseprefill.profiles.profile import Profile

from .test_cli import refused

pytestmark = pytest.mark.usefixtures("_one_tokenizer")
TESTS = str(Path(__file__).parents[1])
SMALL = ("--tokens", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--rounds", "1", "--device", "cpu")
BENCH = ("--table", "executor", *SMALL)
DEMO = ("demo", "--tokens", "1024", "--questions", "1", "--device", "cpu", "--threads", "1")
FIT = ("fit", "--method", "streaming", "--device", "cpu", "--count", "1", "--kl", "9", "--try", "window=64,128")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def after(count: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is interrupted when it is called once more than so often."""
    calls: list[object] = []

    def stopping(*arguments: Any, **options: Any) -> Any:
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(arguments)
        return real(*arguments, **options)

    return stopping


def words(result: Result) -> str:
    return " ".join(result.stderr.split())


def test_bench_shows_the_rows_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "measure", after(2, Bench.measure))
    result = CliRunner().invoke(bench, [*BENCH, "--json", "rows.json"])
    assert result.exit_code == 130, result.output
    assert "tiles 0.5" in result.stdout
    assert "tiles 0.25" not in result.stdout
    assert [row["what"] for row in json.loads(Path("rows.json").read_text())["rows"]] == ["full", "tiles 0.5"]
    assert "stopped after 2 of 13 rows; written: rows.json" in words(result)


def test_bench_of_models_shows_the_lengths_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefill, "run", after(1, Prefill.run))
    small = ("--layers", "1", "--tokens", "128", "--method", "streaming")
    result = CliRunner().invoke(first_token, [*SMALL, *small, "--json", "-"])
    assert result.exit_code == 130, result.output
    assert {64} == {one["tokens"] for one in json.loads(result.stdout)["ttft"]}
    assert "stopped after 1 of 2 lengths; nothing was written" in words(result)


def test_demo_shows_the_readings_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: Any) -> Any:
        found = real(*arguments)
        yield next(found)
        yield next(found)
        raise KeyboardInterrupt

    real = comparison.outcomes
    monkeypatch.setattr(comparison, "outcomes", stopped)
    result = run(*DEMO, "--method", "streaming", "--method", "bfla", "--json")
    assert result.exit_code == 130, result.output
    facts = json.loads(result.stdout)
    assert facts["stopped"] is True
    assert [one["method"] for one in facts["methods"]] == ["stock", "streaming"]
    assert Path("sparseprefill-demo.png").is_file()
    assert "stopped after 2 of 3 readings; written: sparseprefill-demo.png" in words(result)


def test_fit_writes_the_best_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = ("--tokens", "512", "--tokens", "1024")
    monkeypatch.setattr(ModelReadings, "run", after(1, ModelReadings.run))
    result = run(*FIT, *lengths, "-o", "mine.json")
    assert result.exit_code == 130, result.output
    assert "stopped after 1 of 2 lengths; written: mine.json" in words(result)
    assert len(Profile.load(Path("mine.json")).ranges) == 1


@pytest.mark.parametrize(
    ("owner", "name", "command"),
    [
        (comparison, "outcomes", DEMO),
        (ModelReadings, "run", (*FIT, "--tokens", "512")),
        (measure, "calibrate", ("calibrate", "--method", "streaming", "--device", "cpu")),
    ],
    ids=["demo", "fit", "calibrate"],
)
def test_before_there_is_anything_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(owner, name, after(0, getattr(owner, name)))
    refused(run(*command), "stopped: nothing was written", status=130)
    assert list(Path.cwd().iterdir()) == []


def test_what_a_run_wrote_before_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ctrl-C comes when a command no longer waits for it."""

    def interrupted(*arguments: Any, **options: Any) -> None:
        wrote(Path("here.json"))
        wrote(Path("here.json"))
        wrote(Path("there.png"))
        raise KeyboardInterrupt

    monkeypatch.setattr("sparseprefill.adapters.cli.render.write_json", interrupted)
    for _ in range(2):  # and another run begins anew
        refused(run("methods", "--json"), "stopped: written: here.json, there.png", status=130)


def test_a_real_interrupt() -> None:
    """From the terminal, with a bar on it."""
    longer = ("--seconds", "1", "--rounds", "1000000")
    terminal = Terminal(["-m", "lab.bench", *BENCH, *longer], 100, {"PYTHONPATH": TESTS})
    terminal.wait_for(" 1/13 ")
    terminal.interrupt()
    code, text = terminal.end()
    assert code == 130, text
    assert "stopped after 1 of 13 rows; nothing was written" in text
    assert "Traceback" not in text


def test_benches_of_vllm_keep_the_rows_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Several, "measure", after(1, Several.measure))
    heads = ("--heads", "2", "--kv-heads", "1", "--head-dim", "32")
    sizes = (
        "--requests",
        "2",
        "--new",
        "40",
        "--cached",
        "0",
        "--mask",
        "full",
        "--mask",
        "tiles:0.5",
        "--rounds",
        "1",
    )
    files = ("--json", "rows.json", "--markdown", "rows.md")
    result = CliRunner().invoke(vllm_bench, ["requests", *sizes, *heads, *files])
    assert result.exit_code == 130, result.output
    assert "stopped after 1 of 2 rows; written: rows.json, rows.md" in words(result)
    assert [row["work"] for row in json.loads(Path("rows.json").read_text())["rows"]] == ["full"]
    assert "| full |" in Path("rows.md").read_text()


def test_a_bench_of_vllm_that_has_no_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Several, "measure", after(0, Several.measure))
    result = CliRunner().invoke(vllm_bench, ["requests", "--new", "40", "--markdown", "rows.md"])
    assert result.exit_code == 130, result.output
    assert "stopped: nothing was written" in words(result)
