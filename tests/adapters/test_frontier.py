"""Frontiers: which settings no other beats, the attention of all layers beside dense, and the command."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.calibration.candidates import Candidate
from sparseprefill.adapters.calibration.fit import ModelReadings
from sparseprefill.adapters.evaluation.outcome import Contender, Divergence, Summary
from typer.testing import CliRunner, Result

import sparseprefill as sp
from helpers.hf_models import build, prompt
from lab.bench.clock import Clock
from lab.frontier import points
from lab.frontier.app import app
from lab.frontier.layers import Layers, LayersTime
from lab.frontier.points import Point, fastest, frontier, recommended, spread
from lab.frontier.results import markdown
from lab.frontier.sheet import _with, interval
from sparseprefill.errors import ParameterError

from .test_cli import refused

STREAMING = sp.default_registry().get("streaming")
SMALL = ("--tokens", "1024", "--questions", "1", "--device", "cpu", "--threads", "1", "--rounds", "1")
SHORT = (*SMALL, "--seconds", "0.01")
"""Where no time is compared with another."""
TRIED = ("--method", "streaming", "--set", "streaming.sink=16", "--try", "streaming.window=16,512")
QUICK = Clock(torch.device("cpu"), 1, 0.01)

pytestmark = pytest.mark.usefixtures("_one_tokenizer")


def point(right: int, kl: float, seconds: float, failed: str = "") -> Point:
    near = Divergence(torch.full((10,), kl, dtype=torch.float64), 1.0)
    failures = {"p": failed} if failed else {}
    answers: dict[str, Any] = {"answers": (9, 10), "answers_inside": (right, 10)}
    one = Summary(Contender("x"), 1, failures, inside=near, end=near, density=0.5, seconds=seconds, **answers)
    stock = Summary(Contender("stock"), 1, answers=(10, 10), answers_inside=(10, 10), seconds=1.0)
    time = None if failed else LayersTime(seconds, seconds / 10, 1.0, "SDPA")
    return Point(64, Candidate(STREAMING, {}), one, stock, time)


def test_a_point_is_on_the_frontier_unless_another_is_as_good_in_all_and_better_in_one() -> None:
    best, cheap, near, worse, equal = (
        point(10, 0.2, 0.5),
        point(9, 0.3, 0.1),
        point(9, 0.1, 0.9),
        point(9, 0.3, 0.5),
        point(10, 0.2, 0.5),
    )
    found = frontier([best, cheap, near, worse, equal, point(10, 0.0, 0.01, "broken")])
    assert all(one is other for one, other in zip([best, cheap, near, equal], found, strict=True))


def test_where_the_model_itself_has_no_answer_no_point_is_on_the_frontier() -> None:
    made = [point(0, 0.2, 0.5), point(0, 0.1, 0.9)]
    for where, words in (("answers", "10 answers behind the prompt"), ("answers_inside", "10 answers inside")):
        hopeless = [evolve(one, stock=evolve(one.stock, **cast(Any, {where: (0, 10)}))) for one in made]
        assert [] == frontier(hopeless)
        text = markdown(hopeless)
        assert f"the model cannot do the task: its own attention gives none of {words}" in text
        assert not [line for line in text.splitlines() if line.rstrip(" |").endswith("*")]
    unasked = [evolve(one, stock=evolve(one.stock, answers=(0, 0))) for one in made]
    assert 2 == len(frontier(unasked))
    assert "cannot do the task" not in markdown(unasked) + markdown(made)


@pytest.mark.thorough
def test_the_command_says_that_a_model_cannot_do_the_task(folder: Path) -> None:
    few = ("--tokens", "900", "--method", "streaming", "--most", "1")
    result = run("--model", str(folder), *SHORT[2:], *few)
    assert result.exit_code == 0, result.output
    assert "the model cannot do the task" in " ".join(result.stdout.split())
    (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith("streaming ")]
    assert "0 / 10" in row
    assert "*" not in row


def test_without_times_density_is_the_cost() -> None:
    timed = point(10, 0.1, 0.25)
    assert 0.25 == timed.cost
    assert 4.0 == timed.prefill_speedup
    untimed = Point(64, timed.candidate, timed.summary, timed.stock)
    assert 0.5 == untimed.cost


@pytest.mark.parametrize(("most", "expected"), [(0, range(9)), (9, range(9)), (3, (0, 4, 8)), (1, (4,)), (2, (0, 8))])
def test_settings_are_spread_from_first_to_last(most: int, expected: Any) -> None:
    assert [{"x": i} for i in expected] == spread([{"x": i} for i in range(9)], most)


def test_all_layers_are_timed_beside_dense() -> None:
    layers = Layers.of(build("llama"), prompt(200))
    assert [0, 1] == [call.layer for call in layers.calls]
    assert {(1, 4, 200, 8)} == {tuple(call.q.shape) for call in layers.calls}
    time = layers.time(sp.build("streaming", sink=16, window=16, block=16), QUICK)
    assert time.estimate > 0 < time.seconds  # of two clocks of a busy machine: either may be the longer
    assert time.speedup == pytest.approx(time.dense / time.seconds)
    assert "SDPA" == time.baseline


def test_what_a_method_remembers_from_layer_to_layer_begins_anew_with_each_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    pipeline = sp.build("share-prefill", clusters="single")
    run = type(pipeline).run_into

    def noted(self: Any, call: Any, memory: Any, *rest: Any) -> Any:
        seen.append((call.layer, id(memory)))
        kept.append(memory)  # so that no two have the same address
        return run(self, call, memory, *rest)

    kept: list[Any] = []
    monkeypatch.setattr(type(pipeline), "run_into", noted)
    Layers.of(build("llama"), prompt(200)).time(pipeline, QUICK)
    prefills = [seen[i : i + 2] for i in range(0, len(seen), 2)]
    assert len(prefills) > 1
    assert all([0, 1] == [layer for layer, _ in one] for one in prefills)
    assert all(one[0][1] == one[1][1] for one in prefills)
    assert len(prefills) == len({one[0][1] for one in prefills})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral-sliding", "every one has a sliding window"),
        ("gemma2", "layer 1 has a softcap"),
        ("gpt-oss", "attention sinks"),
    ],
)
def test_layers_that_compute_something_else_are_not_timed(name: str, reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        Layers.of(build(name), prompt(64))


def test_layers_with_a_sliding_window_are_left_out() -> None:
    assert [1] == [call.layer for call in Layers.of(build("gemma3"), prompt(64)).calls]


def written(
    right: int,
    kl: float,
    density: float,
    error: str | None = None,
    seconds: float | None = None,
    end: int = 9,
) -> dict[str, Any]:
    about = {"method": "xattention", "tokens": 1024, "parameters": {"threshold": density}, "error": error}
    time = None if seconds is None else {"seconds": seconds}
    inside = {"asked": 100, "right": right, "dense_right": 100, "kl": kl}
    behind = {"asked": 9, "right": end, "dense_right": 9, "kl": 0.0}
    return {**about, "inside": inside, "end": behind, "density": density, "attention": time}


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([written(100, 0.1, 0.5), written(98, 0.9, 0.25), written(97, 0.0, 0.1)], 0.25),
        ([written(98, 0.1, 0.5), written(99, 0.1, 0.25, end=8)], 0.5),
        ([written(97, 0.0, 0.5), written(99, 0.1, 0.25, "no room")], None),
        ([written(99, 0.1, 0.25, "no room")], None),
        ([written(99, 0.0, x, seconds=t) for x, t in ((0.25, 3.0), (0.26, 2.0), (0.5, 1.0))], 0.26),
        ([written(99, kl, 0.25) for kl in (0.2, 0.1)], 0.25),
    ],
)
def test_what_is_recommended_keeps_the_answers_inside_and_behind(
    points: list[dict[str, Any]], expected: float | None
) -> None:
    found = recommended(points)
    assert (None if found is None else found["density"]) == expected


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(100, 3.0), (99, 2.0), (98, 1.0)], 2.0),
        ([(98, 2.0), (97, 1.0)], None),
        ([(99, 2.0), (None, 1.0), (99, None)], 2.0),
        ([], None),
    ],
)
def test_the_fastest_keeps_what_dense_copies(
    points: list[tuple[int | None, float | None]], expected: float | None
) -> None:
    """Of texts without restated passages, and of what was not timed, nobody knows."""
    copied = [None if right is None else {"right": right, "dense_right": 100} for right, _ in points]
    told = [{**written(9, 0.1, 0.5, seconds=t), "copies": one} for one, (_, t) in zip(copied, points, strict=True)]
    found = fastest([*told, {**written(9, 0.1, 0.1, "no room", seconds=0.1), "copies": None}], 0.99)
    assert (None if found is None else found["attention"]["seconds"]) == expected


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_command_on_the_embedded_model(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "a.md", "a.png")]
    result = run(*SMALL, *TRIED, *(f"--{o}={p}" for o, p in zip(("json", "markdown", "plot"), files, strict=True)))
    assert result.exit_code == 0, result.output
    facts = json.loads(files[0].read_text())
    narrow, wide = facts["points"]
    assert [{"sink": 16, "window": 16}, {"sink": 16, "window": 512}] == [one["parameters"] for one in (narrow, wide)]
    assert 0 < narrow["density"] < wide["density"] <= 1
    assert 0 < narrow["recall"] < wide["recall"] <= 1
    assert narrow["end"]["asked"] == wide["end"]["asked"] > 0
    assert narrow["inside"]["asked"] == 0
    assert narrow["inside"]["kl"] > wide["inside"]["kl"] >= 0
    assert "no answers inside the prompt: it is too short" in result.stdout
    assert all(0 < one["attention"]["estimate"] < one["attention"]["seconds"] for one in (narrow, wide))
    assert "embedded" == facts["model"]
    assert 2_000_000 == facts["seed"]
    text = files[1].read_text()
    assert "| streaming | window=16 |" in text
    assert "streaming has sink=16 in all rows" in text
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert "window=512" in result.stdout


@pytest.mark.thorough
def test_a_model_of_the_users_own_at_its_defaults(folder: Path) -> None:
    few = ("--tokens", "900", "--method", "streaming", "--method", "xattention", "--most", "1")
    result = run("--model", str(folder), *SHORT[2:], *few, "--json", "-")
    assert result.exit_code == 0, result.output
    found = [(one["method"], one["parameters"]) for one in json.loads(result.stdout)["points"]]
    assert [("streaming", {}), ("xattention", {})] == found[:2]
    assert 3 == len(found)


@pytest.mark.thorough
def test_settings_from_a_run_on_other_texts(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    points = [written(99, 0.0001, 0.5), written(99, 0.0002, 0.25)]
    file.write_text(json.dumps({"seed": 1000, "texts": 2, "points": points}))
    few = ("--method", "xattention", "--set", "xattention.stride=8", "--from", str(file), "--json", "-")
    result = run(*SHORT, *few)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    expected = {"block": 64, "stride": 8, "threshold": 0.25}
    assert expected == facts["points"][-1]["parameters"]
    assert [str(file)] == facts["from"]
    refused(run(*SHORT, *few, "--seed", "1001"), "--from", "the same texts", "a --seed other than 1001")
    twice = file.read_text().replace("{", '{"seed": 77, ', 1)
    for option in ("--kl", "--copies"):
        refused(run(*SHORT, "--method", "xattention", option, "0.5"), "pass --from FILE, too")
    for text in ("{", "[]", twice, '{"seed": 1, "texts": 1, "points": []}', '{"seed": 1}'):
        file.write_text(text)
        refused(run(*SHORT, *few), "--from", "pass what --json FILE wrote")


@pytest.mark.thorough
def test_configuration_files_beside_methods(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "XAttention, by threshold"\nmethod = "xattention"\n[parameters]\nthreshold = 1.0\nblock = 64\n'
        '[[refiners]]\nname = "relative-threshold"\nshare = 0.1\n'
    )
    result = run(*SHORT, "--method", "streaming", "--most", "1", "--config", str(file), "--json", "-")
    assert result.exit_code == 0, result.output
    *others, mine = json.loads(result.stdout)["points"]
    assert {"streaming"} == {one["method"] for one in others}
    assert ("xattention-by-threshold", {"config": str(file)}) == (mine["method"], mine["parameters"])
    assert mine["error"] is None
    assert 0 < mine["density"] < 1
    file.write_text('method = "xattention"\ngate = "auto"\n')
    refused(run(*SHORT, "--config", str(file)), "mine.toml has a profile or a gate", "leave them out")
    file.write_text('method = "xattenton"\n')
    refused(run(*SHORT, "--config", str(file)), "mine.toml: method: no method is named 'xattenton'")


@pytest.mark.thorough
def test_a_killed_run_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = points.Reader.read

    def killed(self: Any, candidate: Candidate) -> Point:
        if candidate.parameters["window"] == 512:
            raise SystemExit(137)
        return read(self, candidate)

    monkeypatch.setattr(points.Reader, "read", killed)
    file = tmp_path / "a.json"
    run(*SHORT, *TRIED, "--json", str(file))
    facts = json.loads(file.read_text())
    assert facts["stopped"] is True
    assert [16] == [one["parameters"]["window"] for one in facts["points"]]


@pytest.mark.thorough
def test_a_method_that_fails_ends_with_1_and_the_others_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    read = ModelReadings.run

    def failing(self: Any, candidate: Candidate, index: int) -> Any:
        if candidate.parameters["window"] == 16:
            from sparseprefill.adapters.evaluation.outcome import Outcome

            return Outcome(candidate.contender(), "exam", error="no room")
        return read(self, candidate, index)

    monkeypatch.setattr(ModelReadings, "run", failing)
    result = run(*SHORT, *TRIED)
    assert 1 == result.exit_code
    text = " ".join(result.stdout.split())
    assert "streaming (sink=16, window=16) failed: no room" in text
    assert "window=512" in text


@pytest.mark.thorough
def test_ctrl_c_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    read = points.Reader.read

    def stopping(self: Any, candidate: Candidate) -> Point:
        if candidate.parameters["window"] == 512:
            raise KeyboardInterrupt
        return read(self, candidate)

    monkeypatch.setattr(points.Reader, "read", stopping)
    result = run(*SHORT, *TRIED, "--json", "-")
    assert 130 == result.exit_code
    facts = json.loads(result.stdout)
    assert facts["stopped"] is True
    assert [16] == [one["parameters"]["window"] for one in facts["points"]]
    assert "stopped after 1 of 2 settings" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "stream"), ("no method is named 'stream'",)),
        (("--method", "bfla", "--try", "xattention.stride=8"), ("--try xattention.stride=8", "'xattention'")),
        (("--method", "bfla", "--try", "bfla.grup=8"), ("no parameter 'grup'",)),
        ((*TRIED, "--set", "streaming.window=16"), ("--set streaming.window", "--try")),
        (("--method", "bfla", "--tokens", "99999"), ("--tokens 99999", "reads at most")),
        (("--method", "bfla", "--tokens", "256"), ("--tokens 256", "more tokens")),
        (("--method", "bfla", "--plot", "a.txt"), ("--plot a.txt", ".png")),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(run("--device", "cpu", *arguments), *words)


def test_an_interval_is_students_with_the_error_of_a_jackknife() -> None:
    values, times = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64), 3.182446
    half = times * float(values.std()) / 2
    assert pytest.approx((3.0 - half, 3.0 + half)) == interval(lambda rows: values[rows].mean(-1), 4)
    assert _with(lambda rows: values[rows].mean(-1), 4, "{:.1f}") == f"3.0 (0.0 to {3.0 + half:.1f})"
    assert _with(lambda rows: values[rows].mean(-1), 1, "{:.1f}") == "1.0", "one prompt tells none"
