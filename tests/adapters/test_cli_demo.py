"""The command `demo`, with the shipped checkpoint, at a small size."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from matplotlib.image import imread
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.cli.demo import _affordable
from sparseprefill.adapters.cli.results import table_of
from sparseprefill.adapters.demo.model import PARAMETERS
from sparseprefill.adapters.evaluation import comparison
from sparseprefill.adapters.evaluation.outcome import Contender, Outcome, summaries
from sparseprefill.adapters.evaluation.reading import Reader, Sizes
from typer.testing import CliRunner, Result

from sparseprefill import (
    AttentionCall,
    Memory,
    Method,
    Pipeline,
    Plan,
    Registry,
    SparseMask,
    default_registry,
    hookimpl,
)
from sparseprefill import registry as registries

pytestmark = pytest.mark.usefixtures("_one_tokenizer")
SMALL = ("--tokens", "1024", "--questions", "1", "--device", "cpu")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", "--threads", "1", *arguments])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def small(_one_tokenizer: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One run over everything, as JSON, and its picture."""
    path = tmp_path_factory.mktemp("demo") / "masks.png"
    settings = ("--set", "streaming.window=128", "--set", "anchor-attention.step=2")
    result = run(*SMALL, "--full", "--json", "--picture", str(path), *settings)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), path


def test_json(small: tuple[dict[str, Any], Path]) -> None:
    facts, path = small
    assert set(facts) == {
        *(
            "version",
            "model",
            "tokens",
            "questions",
            "seed",
            "device",
            "dtype",
            "threads",
            "tail",
            "recall_floor",
            "stopped",
            "picture",
            "sizes",
        ),
        *("methods", "outcomes"),
    }
    assert (facts["tokens"], facts["questions"], facts["device"], facts["dtype"]) == (1024, 4, "cpu", "float32")
    assert facts["tail"] == 128
    assert facts["picture"] == {"path": str(path), "layer": 4, "head": 0}
    names = [outcome["method"] for outcome in facts["outcomes"]]
    assert names == ["stock", *(name for name in default_registry().methods() if name != "dense")]
    assert names == [method["method"] for method in facts["methods"]]
    stock = facts["methods"][0]
    for outcome, method in zip(facts["outcomes"], facts["methods"], strict=True):
        assert outcome["error"] is None
        assert set(outcome["families"]) == {"single", "multikey", "multivalue", "multiquery"}
        assert method["end"]["asked"] == sum(family["asked"] for family in outcome["families"].values()) == 10
        assert method["end"]["right"] == sum(family["right"] for family in outcome["families"].values())
        assert 800 < outcome["tokens"] < 1024
        assert 0 < outcome["density"] == method["density"] <= 1
        assert 0 < method["recall"]["lowest"] <= method["recall"]["p5"] <= method["recall"]["mean"] <= 1.0001
        beside = outcome["beside_seconds"]
        assert (beside is None) == (method is stock), "each method is held against a stock prefill right beside its own"
        assert method["speed_up"] == pytest.approx((beside or stock["seconds"]) / method["seconds"])
        assert [layer["index"] for layer in outcome["layers"]] == list(range(len(outcome["layers"])))
        assert all(layer["reason"] == "" for layer in outcome["layers"])
        if method is not stock:
            for part in (method["inside"], method["end"]):
                assert 0 <= part["kl"] <= part["worst"]
                assert 0 <= part["agreement"] <= 1


@pytest.mark.parametrize(("slower", "means"), [(1.2, True), (4.0, False)])
def test_on_a_busy_machine_it_says_that_its_times_mean_little(
    slower: float, means: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "clock", lambda self, ids, sizes, seconds: (1.0, None))
    monkeypatch.setattr(Reader, "timed", lambda self, ids: (slower, None))
    monkeypatch.setenv("COLUMNS", "200")
    result = run(*SMALL, "--method", "streaming", "--tail", "0")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert ("took 1.00 to 4.00 s for the same prefill, so other work ran beside it" in said) != means
    (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith("streaming")]
    assert row.split()[-1] == ("1.20" if means else "?")
    assert ", tail 0" in said
    assert "the stock model's time right before or behind it / this time" in said


def test_a_row_shows_the_settings_that_are_not_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    given = ("--method", "streaming", "--set", "sink=64", "--set", "window=256", "--recall-floor", "0.9")
    result = run(*SMALL, *given)
    assert result.exit_code == 0, result.output
    from attrs import fields

    usual = {one.name: one.default for one in fields(default_registry().get("streaming").config)}
    said = " ".join(result.stdout.split())
    for name, value in (("sink", 64), ("window", 256), ("recall", 0.9)):
        assert (f"{name}={value}" in said) == (usual.get(name) != value)
    assert "window=256" in said or "sink=64" in said


def test_the_stock_model_answers(small: tuple[dict[str, Any], Path]) -> None:
    stock = small[0]["methods"][0]
    assert stock["end"]["right"] >= stock["end"]["asked"] - 1
    assert (stock["density"], stock["recall"]["mean"], stock["parameters"]) == (1.0, 1.0, {})
    assert stock["inside"] == {}


def test_parameters_come_from_the_table_and_from_the_options(small: tuple[dict[str, Any], Path]) -> None:
    found = {method["method"]: method for method in small[0]["methods"]}
    assert found["streaming"]["parameters"] == {**PARAMETERS["streaming"], "window": 128}
    assert found["streaming"]["density"] < 0.8  # of 1024 tokens the dense tail is a good part
    assert found["anchor-attention"]["parameters"] == {**PARAMETERS["anchor-attention"], "step": 2}


def test_the_table_of_parameters_suits_the_methods() -> None:
    for name, parameters in PARAMETERS.items():
        default_registry().build(name, **parameters)


def test_picture_is_a_png(small: tuple[dict[str, Any], Path]) -> None:
    assert small[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width = imread(small[1]).shape[:2]
    assert width > height > 200


def test_a_first_look_runs_three_methods_and_names_each() -> None:
    result = run(*SMALL, "--json", "--set", "xattention.threshold=0.8")
    assert result.exit_code == 0, result.output
    names = [one["method"] for one in json.loads(result.stdout)["methods"]]
    assert names == ["stock", "rowmax", "bfla", "streaming", "xattention"]
    lines = [line.split(":")[0] for line in result.stderr.splitlines() if ": " in line]
    assert lines == ["dense (stock)", *names[1:]]
    assert "end 10 / 10" in result.stderr


def test_a_signal_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = comparison.outcomes

    def stops(*arguments: Any, **more: Any) -> Iterator[Any]:
        for done, outcome in enumerate(whole(*arguments, **more)):
            yield outcome
            if done == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(comparison, "outcomes", stops)
    result = run(*SMALL, "--json")
    assert result.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    facts = json.loads(result.stdout)
    assert facts["stopped"] is True
    assert [one["method"] for one in facts["methods"]] == ["stock", "rowmax"]
    assert "stopped after 2 of 4 readings" in result.stderr


def test_table() -> None:
    result = run(*SMALL, "--method", "streaming", "--method", "dense", "--seed", "2", "--layer", "1", "--head", "3")
    assert result.exit_code == 0, result.output
    assert "1,024 tokens, 4 questions, seed 2, cpu (1 thread), float32" in result.stdout
    for word in (
        "method",
        "end",
        "KL",
        "99 %",
        "density",
        "recall",
        "prefill",
        "speed-up",
        "dense (stock)",
        "streaming",
    ):
        assert word in result.stdout
    assert "anchor-attention" not in result.stdout
    assert "picture of layer 1, head 3: sparseprefill-demo.png" in result.stdout
    assert Path("sparseprefill-demo.png").stat().st_size > 10_000
    assert "heads and 64 rows" in " ".join(result.stdout.split())
    dense = next(line.split() for line in result.stdout.splitlines() if line.strip().startswith("dense  "))
    assert dense[4:13] == ["0.0000", "0.0000", "1.000", "100.0%", "0.0000", "100.0%", "100.0%", "100.0%", "100.0%"]
    assert "no answers inside the prompt: it is too short" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "anchor"), ("no method is named 'anchor'",)),
        (("--set", "streaming.window"), ("--set streaming.window", "method.parameter=value")),
        (("--set", "window=3"), ("method.parameter=value",)),
        (("--set", "nothing.window=3"), ("'nothing' is not among the methods of this run",)),
        (("--set", "dense.block=64"), ("'dense' is not among the methods of this run",)),
        (("--set", "streaming.windov=3"), ("no parameter 'windov'", "did you mean 'window'?")),
        (("--set", "streaming.window=0"), ("window is 0", "pass an integer >= 1")),
        (("--set", "streaming.window=wide"), ("window is 'wide'",)),
        (("--set", "anchor-attention.theta=nan"), ("theta is nan",)),
        (("--set", 'streaming.window={"a": 1, "a": 2}'), ("has the key 'a' twice", "remove one")),
        (("--tokens", "256"), ("--tokens 256", "more tokens")),
        (("--tokens", "100000"), ("--tokens 100000", "at most")),
        (("--layer", "99"), ("--layer 99", "pass 0 to")),
        (("--head", "99"), ("--head 99", "pass 0 to")),
        (("--device", "moon"), ("--device moon",)),
        (("--picture", "nowhere/p.png"), ("--picture nowhere/p.png", "there is no folder")),
        (("--picture", "folder.png"), ("--picture folder.png", "that is a folder")),
        (("--picture", "p.pdf"), ("ends in .png",)),
    ],
)
def test_refused(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    Path("folder.png").mkdir()
    before = set(Path().iterdir())
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokens", "many"),
        ("--tokens", "12"),
        ("--questions", "0"),
        ("--dtype", "int8"),
        ("--layer", "-1"),
        ("--threads", "0"),
    ],
)
def test_bad_values(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert arguments[0] in result.stderr


def test_an_existing_picture_survives_a_refusal() -> None:
    path = Path("mine.png")
    path.write_text("kept")
    assert run("--picture", str(path), "--method", "nope").exit_code == 1
    assert path.read_text() == "kept"


@frozen
class _Config:
    """No parameters."""


class _Raises:
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        raise ZeroDivisionError("by zero")


class _Objects:
    def unsupported(self, call: AttentionCall) -> str | None:
        return "odd layers are not honoured" if call.layer % 2 else None

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        return Plan(SparseMask.full(call))


def _built(stage: type[_Objects] | type[_Raises], config: _Config) -> Pipeline:
    return Pipeline(stage())


class _Plugin:
    @hookimpl
    def sparseprefill_methods(self) -> list[Method]:
        return [
            Method(name=name, summary="a test", config=_Config, build=partial(_built, stage))
            for name, stage in (("objects", _Objects), ("raises", _Raises))
        ]


def test_a_method_that_fails_and_one_that_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    registry.register(_Plugin(), "mine")
    monkeypatch.setattr(registries, "default_registry", lambda: registry)
    result = run(*SMALL, "--full", "--json", "--layer", "1")
    assert result.exit_code == 1
    stock, objects, raises = json.loads(result.stdout)["outcomes"]
    assert stock["error"] is None
    assert "ZeroDivisionError: by zero" in raises["error"]
    assert {layer["reason"] for layer in objects["layers"]} == {"", "_Objects: odd layers are not honoured"}
    assert objects["density"] == 1.0
    text = run(*SMALL, "--method", "objects").stdout
    assert "objects: dense in layers 1, 3, 5: _Objects: odd layers are not honoured" in text


def test_a_broken_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, dist = "broken", None

        def load(self) -> Any:
            raise ImportError("no module named 'gone'")

    registry = Registry()
    registry.register(_Plugin(), "mine")
    registry.load_entry_points([Point()])  # type: ignore[list-item]
    monkeypatch.setattr(registries, "default_registry", lambda: registry)
    result = run(*SMALL, "--method", "objects")
    assert result.exit_code == 0
    assert "failed to load and is left out: no module named 'gone'" in " ".join(result.stderr.split())


def test_configured_pipelines_run_beside_methods(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nmethod = "streaming"\n\n[parameters]\nwindow = 256\nsink = 128\n')
    result = run(*SMALL, "--json", "--method", "streaming", "--config", str(path))
    assert result.exit_code == 0, result.output
    outcomes = {outcome["method"]: outcome for outcome in json.loads(result.stdout)["outcomes"]}
    assert {"stock", "streaming", "mine"} == set(outcomes)
    assert all(0 < outcome["density"] <= 1 for outcome in outcomes.values())
    assert not any(outcome["error"] for outcome in outcomes.values())


def test_a_wrong_configuration_is_one_line_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text('{"method": "streaming", "parameters": {"windw": 1}}')
    result = run(*SMALL, "--config", str(path))
    assert result.exit_code == 1
    assert "parameters.windw is unknown; did you mean 'window'?" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("seconds", "most", "tokens"),
    [
        ({512: 0.5, 1024: 1.0, 8: 0.01}, None, 8192),
        ({512: 0.5, 1024: 1.0, 8: 0.01}, 5000, 4096),
        ({512: 2.0, 1024: 4.0, 8: 0.01}, None, 2048),
        ({512: 1.0, 1024: 4.0, 8: 0.01}, None, 1024),  # as the square
        ({512: 0.5, 1024: 1.0, 8: 0.4}, None, 2048),  # answers take the time
        ({256: 90.0, 512: 180.0, 8: 1.0}, 512, 512),
    ],
)
def test_a_models_text_on_a_cpu_is_as_long_as_there_is_time_for(
    seconds: dict[int, float], most: int | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "once", lambda self, count: seconds[count])
    assert _affordable(None, most, 4) == tokens


def test_a_model_on_a_cpu(folder: Path) -> None:
    result = run("--model", str(folder), "--method", "streaming", "--device", "cpu", "--layer", "1", "--json")
    assert result.exit_code == 0, result.output
    assert "1,024 tokens: as many as this CPU reads in about two minutes; --tokens reads more" in result.stderr
    facts = json.loads(result.stdout)
    assert (facts["tokens"], facts["questions"], facts["sizes"]["every"]) == (1024, 4, 8)


def test_a_table_says_of_how_many_rows_it_speaks() -> None:
    stock = summaries([Outcome(Contender("stock"), "one", 1161)], 0)
    assert "over the 1001 rows of the whole prompt but its last 160" in table_of(stock, Sizes()).notes
    assert "over the 126 rows, one in 8, of the whole prompt but its last 160" in table_of(stock, Sizes(every=8)).notes
