"""The command `bench` on a CPU, and the tables of our pages: what is printed and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sparseprefill.adapters.cli.commands import app
from typer.testing import CliRunner, Result

from experiments.bench.app import app as tables

from .test_cli import refused

TINY = ("--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--rounds", "1", "--tokens", "300", "--device", "cpu")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def made(*arguments: str) -> Result:
    return CliRunner().invoke(tables, list(arguments))


def test_methods_and_masks(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    how = ("--method", "streaming", "--set", "streaming.window=64", "--executor", "tiles:0.2")
    result = invoke(*TINY, *how, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "times on a CPU" in result.stdout
    assert "window=64" in result.stdout
    found = json.loads(path.read_text())
    assert set(found) == {"version", "machine", "seed", "rounds", "rows", "ttft"}
    mask, method = found["rows"]
    assert (mask["kind"], mask["what"], mask["input"]) == ("executor", "tiles 0.2", "random")
    assert (method["kind"], method["what"], method["input"]) == ("method", "streaming", "heads")
    assert method["parameters"] == {"window": 64}
    assert method["baseline"] == "SDPA"
    assert 0 < method["density"] <= 1
    assert method["speedup"] == pytest.approx(method["dense_seconds"] / method["seconds"])


def test_a_table_with_its_picture_and_as_markdown(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"figures.{name}" for name in ("png", "md")}
    written = ("--plot", str(paths["png"]), "--markdown", str(paths["md"]))
    result = made(*TINY, "--table", "executor", *written)
    assert result.exit_code == 0, result.output
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert "| tiles 0.25 |" in paths["md"].read_text()


def test_a_table_at_another_length() -> None:
    result = made(*TINY, "--table", "executor", "--json", "-")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 9
    assert {row["table"] for row in rows} == {"executor"}
    assert rows[0]["density"] == 1.0


def test_a_table_of_one_method_with_and_without_the_gate() -> None:
    rows = json.loads(made(*TINY, "--table", "short", "--method", "bfla", "--json", "-").stdout)["rows"]
    assert [row["gate"] for row in rows] == [False, True]


def test_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('method = "streaming"\nname = "narrow"\n[parameters]\nwindow = 32\n')
    rows = json.loads(invoke(*TINY, "--config", str(path), "--json", "-").stdout)["rows"]
    assert [row["what"] for row in rows] == ["narrow"]


def test_first_token_of_a_model() -> None:
    result = invoke(*TINY, "--ttft", "--layers", "1", "--method", "streaming")
    assert result.exit_code == 0, result.output
    assert "stock (SDPA)" in result.stdout
    assert "made-up heads" in " ".join(result.stdout.split())


def test_new_tokens_behind_cached_ones_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "chunks.json"
    sizes = ("--tokens", "300", "--new", "40", "--new", "70", "--page", "16", "--heads", "4", "--kv-heads", "2")
    little = ("--head-dim", "32", "--rounds", "1", "--seconds", "0.01", "--device", "cpu", "--method", "streaming")
    result = made("--table", "chunks", *sizes, *little, "--json", str(path))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "40 of them new, pages of 16" in text
    assert "70 of them new, pages of 16" in text
    rows = json.loads(path.read_text())["rows"]
    assert [(one["table"], one["what"]) for one in rows] == [("chunks", "streaming")] * 2
    both = ("--table", "chunks", "--table", "long")
    refused(made(*both, "--new", "40", "--device", "cpu"), "--new goes with --table chunks alone")


def test_a_method_that_fails_ends_with_1() -> None:
    result = made(*TINY, "--table", "captured", "--method", "streaming")
    assert result.exit_code == 1
    assert "head_dim is 32" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--executor", "tile:1"), "tiles:SHARE"),
        (("--heads", "5"), "heads is 5"),
        (("--method", "blfa"), "did you mean 'bfla'"),
        (("--set", "bfla=1"), "method.parameter=value"),
        (("--set", "bfla.blok=1"), "did you mean 'block'"),
        (("--json", "/nowhere/a.json"), "there is no folder /nowhere; make it"),
        (("--ttft", "--executor", "full"), "--executor cannot be combined with --ttft"),
        (("--ttft", "--page", "16"), "--page cannot be combined with --ttft"),
        (("--tokens", "256", "--new", "257", "--method", "bfla"), "new is 257"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, ...], words: str) -> None:
    refused(invoke("--device", "cpu", *arguments), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--table", "method"), "did you mean 'methods'"),
        (("--table", "executor", "--method", "bfla"), "--table executor has no case of it"),
        (("--table", "executor", "--plot", "a.txt"), ".png"),
        (("--table", "executor", "--new", "64"), "--new goes with --table chunks alone"),
        (("--table", "long", "--tokens", "99999999999"), "or less"),
    ],
)
def test_what_does_not_fit_a_table_is_refused(arguments: tuple[str, ...], words: str) -> None:
    refused(made("--device", "cpu", *arguments), words)
