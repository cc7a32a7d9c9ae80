"""Calibration on a small scale, the file that it writes, and how the command fails."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from sparseprefill.adapters.calibration.layers import layers_of
from sparseprefill.adapters.calibration.measure import (
    LAYERS,
    HeadSizes,
    Run,
    calibrate,
    joined,
    method_time,
    sizes,
)
from sparseprefill.adapters.calibration.measure import Clock as Fastest
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.session.session import Session
from typer.testing import CliRunner, Result

import sparseprefill as sp
from helpers.tables import from_length
from lab.bench.clock import Clock
from sparseprefill import kernels
from sparseprefill.breakeven.points import HeadShape, MethodTime, Point
from sparseprefill.breakeven.table import BELOW, BreakEven
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.recording import Recording

from .test_cli import refused

TINY = HeadSizes(heads=2, kv_heads=1, head_dim=32, dtype="float32")
CLOCK = Clock(torch.device("cpu"), 2, 0.01)
OPTIONS = ("calibrate", "--method", "streaming", "--tokens", "64", "--tokens", "128", "--chunk", "32", "--repeats", "2")
SHAPE = ("--heads", "2", "--kv-heads", "1", "--head-dim", "32")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_sizes_are_whole_prompts_and_chunks_of_the_longer_ones() -> None:
    assert [(32, 64), (32, 100), (50, 50), (64, 64), (100, 100)] == sizes((100, 50, 64, 64), (32,))
    assert [(16, 64), (16, 100), (50, 100), (64, 64), (100, 100)] == sizes((64, 100), (50, 16, 16))
    assert [(64, 64)] == sizes((64,))
    for lengths, chunks in (((), ()), ((0,), ()), ((64,), (0,))):
        with pytest.raises(sp.ParameterError, match="pass"):
            sizes(lengths, chunks)


def test_heads_must_be_a_multiple_of_the_kv_heads() -> None:
    with pytest.raises(sp.ParameterError, match="heads is 3: pass a multiple of the 2 KV heads"):
        HeadSizes(heads=3, kv_heads=2, head_dim=32, dtype="float32")


def test_every_size_has_its_figures() -> None:
    progress: list[tuple[str, int, int]] = []
    method = sp.build("streaming", sink=16, window=16, block=16)
    found = calibrate(TINY, sizes((64, 300), (32,)), {"streaming": method}, CLOCK, lambda *what: progress.append(what))
    assert [(32, 64), (32, 300), (64, 64), (300, 300)] == [(one.queries, one.keys) for one in found.shape.points]
    assert {} == found.failed
    for point in found.shape.points:
        one = point.methods["streaming"]
        assert 0 < one.estimate < 10
        assert 0 < one.density <= 1
        assert point.dense > 0
        assert point.executor
        densities = [ran.density for ran in point.executor]
        assert densities == sorted(densities)
    assert ("streaming", 1, 4) in progress
    assert ("done", 4, 4) == progress[-1]


def test_a_method_that_fails_is_left_out_with_its_reason() -> None:
    class Fails:
        def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
            if call.k.shape[2] > 64:
                raise RuntimeError("too long for me")
            return sp.Plan(sp.SparseMask.full(call))

    methods = {"fails": sp.Pipeline(Fails()), "streaming": sp.build("streaming")}
    found = calibrate(TINY, sizes((64, 128)), methods, CLOCK)
    assert [{"fails", "streaming"}, {"streaming"}] == [set(point.methods) for point in found.shape.points]
    assert "128 x 128: pipeline: Fails.estimate() raised RuntimeError: too long for me" == found.failed["fails"]


def test_every_method_can_be_calibrated() -> None:
    from sparseprefill.adapters.cli.calibrate import TIMED

    methods = {
        name: method.pipeline(**method.stand_in, **TIMED.get(name, {}))
        for name, method in sp.default_registry().methods().items()
    }
    found = calibrate(TINY, sizes((128,)), methods, CLOCK)
    assert {} == found.failed
    assert set(methods) == set(found.shape.points[0].methods)


def test_the_clock_takes_the_fastest_run_that_counts() -> None:
    runs: list[int] = []
    assert 0 <= Clock(torch.device("cpu"), 5, 10.0).fastest(lambda: runs.append(1)) < 1
    assert 6 == len(runs)


def test_a_layer_is_timed_in_a_step_that_fits_the_budget() -> None:
    """A GPU's clock by default; here a clock that says what each step takes."""

    @frozen
    class Told(Fastest):
        def once(self, run: Run, count: int = 1) -> float:
            before = len(runs)
            run()
            return 0.01 + 0.02 * (runs[before] - 1)

    runs: list[int] = []
    assert 24 == LAYERS == Fastest(torch.device("cuda")).layers
    clock = Told(torch.device("cuda"), 3, 1.0)
    assert pytest.approx(0.47 / 24) == clock.layer(runs.append)
    assert [2, 1, 24, 24] == runs
    runs.clear()
    assert pytest.approx(0.15 / 8) == evolve(clock, budget=0.16).layer(runs.append)
    assert [2, 1, 8, 8] == runs
    runs.clear()
    assert pytest.approx(0.01) == evolve(clock, budget=0.001).layer(runs.append)
    assert [2, 1, 1, 1] == runs


def test_on_a_cpu_a_layer_is_a_step() -> None:
    runs: list[int] = []
    clock = Fastest(torch.device("cpu"), 3, 10.0)
    clock.layer(runs.append)
    assert ({"repeats": 3}, [1] * 4) == (clock.told, runs)
    assert {"repeats": 3, "layers": 24} == Fastest(torch.device("cuda"), 3).told


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers whose calls a session is asked for."""
    found: list[int] = []
    real = Session.run_many

    def run_many(self: Session, calls: Any, *given: Any) -> Any:
        found.extend(call.layer for call, *_ in calls)
        return real(self, calls, *given)

    monkeypatch.setattr(Session, "run_many", run_many)
    return found


def test_without_a_gpu_each_layer_of_a_step_is_asked_and_what_fails_is_raised(asked: list[int]) -> None:
    q, k, v = (torch.randn(1, heads, 128, 32) for heads in (2, 1, 1))
    call = sp.AttentionCall(q, k, v)
    layers_of(call, sp.build("streaming"))(3)
    assert [0, 1, 2] == asked
    found = method_time(call, sp.build("streaming"), Fastest(torch.device("cpu"), 2, 0.01, layers=3))
    assert 0 < found.seconds < 1
    with pytest.raises(sp.UnsupportedCallError, match="sinks"):
        layers_of(evolve(call, sinks=torch.zeros(2)), sp.Pipeline(Objects()))(1)


class Objects:
    def unsupported(self, call: sp.AttentionCall) -> str | None:
        return "it has sinks"

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        return sp.Plan(sp.SparseMask.full(call))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
def test_where_kernels_serve_one_layer_of_a_step_is_asked(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serve", "serve_device"):
        monkeypatch.setattr(kernels, name, lambda _: True)
    method = evolve(sp.build("streaming", sink=16, window=16, block=16), executor=TritonExecutor())
    q, k, v = (torch.randn(1, heads, 64, 64) for heads in (2, 1, 1))
    step = layers_of(sp.AttentionCall(q[:, :, 32:].contiguous(), k, v), method)
    step(3)
    step(2)
    assert [0, 0] == asked


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
@pytest.mark.parametrize(("rows", "recordings"), [(32, 1), (64, 3)])
def test_of_a_chunk_sizes_are_known_and_of_a_whole_prompt_new(
    rows: int, recordings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("serve", "serve_device"):
        monkeypatch.setattr(kernels, name, lambda _: True)
    made, step_of = list[int](), Recording.step

    def step(self: Recording, found: Any) -> Any:
        made.append(1)
        return step_of(self, found)

    monkeypatch.setattr(Recording, "step", step)
    method = evolve(sp.build("streaming", sink=16, window=16, block=16), executor=TritonExecutor())
    q, k, v = (torch.randn(1, heads, 64, 64) for heads in (2, 1, 1))
    run = layers_of(sp.AttentionCall(q[:, :, 64 - rows :].contiguous(), k, v), method)
    for _ in range(3):
        run(2)
    assert recordings == len(made)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["rowmax", "bfla", "xattention"])
def test_on_a_gpu_the_layers_behind_the_first_repeat_it(method: str, asked: list[int]) -> None:
    q, k, v = HeadSizes().made_up(4096, torch.device("cuda"))
    step = layers_of(sp.AttentionCall(q[:, :, 2048:].contiguous(), k, v), sp.build(method))
    for _ in range(2):
        step(LAYERS)
    assert [0, 0] == asked


def test_the_command_writes_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    result = invoke(*OPTIONS, *SHAPE, "--out", path)
    assert result.exit_code == 0, result.output
    for word in ("2 / 1 heads, d 32, float32", "streaming", "64", "128", "the last 32 rows", "table:"):
        assert word in result.stdout
    found = BreakEven.load(path)
    assert ("cpu", None) == (found.device.type, found.device.capability)
    assert {"sparseprefill", "torch", "python"} == set(found.versions)
    assert {"parameters": {}, "repeats": 2, "threads": 1} == found.measured
    (shape,) = found.shapes
    assert [(32, 64), (32, 128), (64, 64), (128, 128)] == [(one.queries, one.keys) for one in shape.points]


def test_the_command_that_a_verdict_names_measures_what_is_missing(tmp_path: Path) -> None:
    out, (q, k, v) = tmp_path / "own.json", (torch.randn(1, heads, 128, 32) for heads in (2, 1, 1))
    call = sp.AttentionCall(q, k, v)
    missing = from_length(64, "another").judge(call, "streaming").reason
    found = re.search("sparseprefill (calibrate .*) measures", missing)
    assert found is not None
    result = invoke(*shlex.split(found[1]), "--tokens", "64", "--tokens", "128", "--repeats", "2", "--out", out)
    assert (0, "") == (result.exit_code, BreakEven.load(out).judge(call, "streaming").reason.removeprefix(BELOW))


def test_append_keeps_the_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert invoke(*OPTIONS, *SHAPE, "--out", path).exit_code == 0
    for _ in range(2):
        done = invoke(*OPTIONS, "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--append", "--out", path)
        assert done.exit_code == 0, done.output
    assert [(2, 1, 32), (4, 2, 64)] == [(one.heads, one.kv_heads, one.head_dim) for one in BreakEven.load(path).shapes]


def test_append_adds_a_method_and_keeps_the_speed_up_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    first = invoke(*OPTIONS, *SHAPE, "--set", "streaming.window=32", "--out", path)
    assert first.exit_code == 0, first.output
    before = BreakEven.load(path).shapes[0]
    options = [one if one != "streaming" else "bfla" for one in OPTIONS]
    done = invoke(*options, *SHAPE, "--append", "--out", path)
    assert done.exit_code == 0, done.output
    table = BreakEven.load(path)
    assert table.measured["parameters"] == {"streaming": {"window": 32}}
    (shape,) = table.shapes
    assert len(shape.points) == len(before.points)
    for old, new in zip(before.points, shape.points, strict=True):
        assert {"streaming", "bfla"} == set(new.methods)
        assert new.dense / new.methods["streaming"].seconds == pytest.approx(
            old.dense / old.methods["streaming"].seconds
        )
        assert new.methods["streaming"].density == old.methods["streaming"].density


def test_append_says_where_what_it_keeps_was_timed_in_other_steps(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert invoke(*OPTIONS, *SHAPE, "--out", path).exit_code == 0
    facts = json.loads(path.read_text())
    facts["measured"]["layers"] = 24
    path.write_text(json.dumps(facts), encoding="utf-8")
    for _ in range(2):  # it stays known
        done = invoke(*OPTIONS, *SHAPE, "--append", "--out", path)
        assert "Times were those of a layer in a step of 24, and are now of one in 1" in " ".join(done.stdout.split())
        assert 24 == BreakEven.load(path).measured["kept_layers"]


def test_append_forgets_settings_of_what_is_timed_anew_and_keeps_to_the_threads(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert invoke(*OPTIONS, *SHAPE, "--set", "streaming.window=32", "--out", path).exit_code == 0
    assert invoke(*OPTIONS, *SHAPE, "--append", "--out", path).exit_code == 0
    assert {} == BreakEven.load(path).measured["parameters"]
    result = invoke(*OPTIONS, *SHAPE, "--append", "--threads", "2", "--out", path)
    assert (1, f"--append: {path} was timed with --threads 1: pass that, or write to another file") == (
        result.exit_code,
        " ".join(result.stderr.split()).removeprefix("error: "),
    )


def test_a_table_holds_finite_numbers_alone_which_is_said_before_the_work(tmp_path: Path) -> None:
    result = invoke(
        *OPTIONS, *SHAPE, "--method", "flexprefill", "--set", "flexprefill.tau=inf", "--out", tmp_path / "a"
    )
    assert (1, "error: flexprefill.tau is inf: pass a finite number\n") == (result.exit_code, result.stderr)


def test_sizes_of_both_runs_stay() -> None:
    def point(size: int, dense: float, **methods: float) -> Point:
        return Point(
            queries=size,
            keys=size,
            dense=dense,
            methods={name: MethodTime(seconds=time, estimate=time / 2, density=0.5) for name, time in methods.items()},
        )

    heads: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 32, "dtype": "float32"}
    before = HeadShape(**heads, points=(point(64, 2.0, a=1.0), point(256, 8.0, a=2.0)))
    now = HeadShape(**heads, points=(point(64, 4.0, b=3.0), point(128, 5.0, b=4.0)))
    found = joined(before, now)
    assert found.points == (point(64, 4.0, a=2.0, b=3.0), point(128, 5.0, b=4.0), point(256, 8.0, a=2.0))


def test_json_and_parameters(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    result = invoke(*OPTIONS, *SHAPE, "--set", "streaming.window=32", "--output", path, "--json")
    facts = json.loads(result.stdout)
    assert {"streaming": {"window": 32}} == facts["measured"]["parameters"]
    assert {"streaming"} == set(facts["worth_from"]) == set(facts["ratios"])
    assert [{"queries": 32, "keys": [64, 128]}, {"queries": None, "keys": [64, 128]}] == [
        {name: line[name] for name in ("queries", "keys")} for line in facts["ratios"]["streaming"]
    ]


def test_chunks_of_several_sizes_or_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for more, rows in ((("--chunk", "16"), {16, 32, 64, 128}), ((), {32, 64, 128})):
        assert invoke(*OPTIONS, *more, *SHAPE, "--out", path).exit_code == 0
        assert rows == {point.queries for point in BreakEven.load(path).shapes[0].points}
    none = [one if one != "32" else "0" for one in OPTIONS]
    assert invoke(*none, *SHAPE, "--out", path).exit_code == 0
    assert all(point.whole for point in BreakEven.load(path).shapes[0].points)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "streamin"), ("no method is named 'streamin'",)),
        (("--method", "streaming", "--set", "streaming"), ("--set streaming: write method.parameter=value",)),
        (("--method", "streaming", "--set", "dense.block=8"), ("'dense' is not among the methods",)),
        (("--method", "streaming", "--set", "streaming.windov=8"), ("did you mean 'window'",)),
        (("--heads", "3", "--kv-heads", "2"), ("heads is 3: pass a multiple of the 2 KV heads",)),
        (("--out", "nowhere/at/all.json"), ("there is no folder",)),
        (("--device", "cuda:99"), ("--device cuda:99",)),
        (("--append", "--out", "none.json"), ("No such file",)),
    ],
)
def test_what_cannot_be_done(
    arguments: tuple[Any, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(invoke("calibrate", *arguments), *words)


def test_append_refuses_a_table_of_another_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert invoke(*OPTIONS, *SHAPE, "--out", path).exit_code == 0
    facts = json.loads(path.read_text())
    facts["device"] |= {"type": "cuda", "capability": [9, 0], "name": "far"}
    path.write_text(json.dumps(facts), encoding="utf-8")
    refused(invoke(*OPTIONS, *SHAPE, "--append", "--out", path), "far (cuda 9.0), this is cpu")
