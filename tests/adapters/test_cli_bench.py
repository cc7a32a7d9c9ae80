"""The tables of our pages on a CPU, and a model's first token: what is printed and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lab.bench.app import app as tables
from lab.bench.first_token import app as first_token
from lab.bench.kernels import app as kernels

from .test_cli import refused

TINY = ("--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--rounds", "1", "--tokens", "300", "--device", "cpu")
HUGE = "99999999999"


def made(*arguments: str) -> Result:
    return CliRunner().invoke(tables, list(arguments))


def test_methods_and_masks(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = made(*TINY, "--table", "chunks", "--method", "streaming", "--new", "40", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "times on a CPU" in result.stdout
    found = json.loads(path.read_text())
    assert set(found) == {"version", "machine", "seed", "rounds", "rows"}
    (method,) = found["rows"]
    assert (method["kind"], method["what"], method["input"]) == ("method", "streaming", "heads")
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
    assert len(rows) == 13
    assert {row["table"] for row in rows} == {"executor"}
    assert rows[0]["density"] == 1.0


def test_a_table_of_one_method_with_and_without_the_gate() -> None:
    rows = json.loads(made(*TINY, "--table", "short", "--method", "bfla", "--json", "-").stdout)["rows"]
    assert [row["gate"] for row in rows] == [False, True]


def test_first_token_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    small = ("--layers", "1", "--method", "streaming", "--set", "window=64", "--json", str(path))
    result = CliRunner().invoke(first_token, [*TINY, *small])
    assert result.exit_code == 0, result.output
    assert "stock (SDPA)" in result.stdout
    assert "made-up heads" in " ".join(result.stdout.split())
    names = [one["name"] for one in json.loads(path.read_text())["ttft"]]
    assert names == ["stock (SDPA)", "streaming (window=64)"]


def test_what_a_call_launches(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    asked = ("--method", "streaming", "--method", "bfla", "--new", "40", "--json", str(path))
    result = CliRunner().invoke(kernels, [*TINY, *asked])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())["kernels"]
    assert {one["method"] for one in found} == {"streaming", "bfla"}
    times = [one["microseconds"] for one in found if one["method"] == "bfla"]
    assert times == sorted(times, reverse=True)
    products = next(one for one in found if (one["method"], one["name"]) == ("bfla", "aten::bmm"))
    whole = CliRunner().invoke(kernels, [*TINY, *asked, "--whole"])
    assert whole.exit_code == 0, whole.output
    more = json.loads(path.read_text())["kernels"]
    assert products["launches"] >= 1
    assert sum(one["launches"] for one in more) > sum(one["launches"] for one in found)


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
        (("--table", "method"), "did you mean 'methods'"),
        (("--table", "executor", "--method", "bfla"), "--table executor has no case of it"),
        (("--table", "executor", "--plot", "a.txt"), ".png"),
        (("--table", "executor", "--new", "64"), "--new goes with --table chunks alone"),
        (("--table", "long", "--tokens", HUGE), "or less"),
        (("--table", "methods", "--tokens", "16", "--tokens", HUGE), f"--tokens {HUGE}"),
        (("--table", "chunks", "--page", HUGE), f"--page {HUGE}"),
        (("--table", "chunks", "--new", HUGE), f"new is {HUGE}"),
        (("--table", "chunks", "--tokens", "256", "--new", "257"), "new is 257"),
        (("--table", "methods", "--heads", HUGE, "--kv-heads", "1"), "pass fewer or smaller heads"),
        (("--table", "methods", "--tokens", "9" * 30), "pass an integer from 2 to 2^63 - 1"),
        (("--table", "methods", "--heads", "5"), "heads is 5"),
        (("--table", "methods", "--method", "blfa"), "did you mean 'bfla'"),
        (("--table", "methods", "--json", "/nowhere/a.json"), "there is no folder /nowhere; make it"),
    ],
)
def test_what_does_not_fit_a_table_is_refused(arguments: tuple[str, ...], words: str) -> None:
    refused(made("--device", "cpu", *arguments), words)
