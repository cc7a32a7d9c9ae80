"""A recall floor in hosts: `attach`, the commands that take methods, and vLLM's table."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.vllm.options import parse
from typer.testing import CliRunner

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING
from lab.frontier.app import app as frontier
from sparseprefill.errors import ParameterError
from sparseprefill.profiles.profile import Profile

FLOOR = sp.RecallFloor(target=0.9)
SMALL = ("--device", "cpu", "--threads", "1", "--method", "streaming")
NARROW = ("--set", "sink=16", "--set", "window=64")
SETS = ("--set", "streaming.sink=16", "--set", "streaming.window=16", "--set", "streaming.block=16")

pytestmark = pytest.mark.usefixtures("_one_tokenizer")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("built", [False, True])
def test_attach_keeps_the_recall_of_sampled_rows(built: bool) -> None:
    model, seen = hf_models.build("llama"), []

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        seen.append((call, result))

    method: Any = sp.build("streaming", **STREAMING) if built else "streaming"
    parameters = {} if built else STREAMING
    with torch.no_grad(), attach(model, method, recall=0.9, observe=observe, gate=None, tail=0, **parameters):
        model(hf_models.prompt(300))
    assert [0, 1] == [call.layer for call, _ in seen]
    bare = sp.build("streaming", **STREAMING)
    for call, result in seen:
        sample = result.plan.notes["recall_sample"]
        kept = sp.recall(call, result, rows=sample.rows[0])
        torch.testing.assert_close(sample.after, kept, atol=1e-5, rtol=0)
        assert bool((kept >= 0.9 - 1e-5).all())
        assert bool((sp.recall(call, bare.run(call), rows=sample.rows[0]) < 0.9).any())


def test_vllms_table_has_the_word() -> None:
    for given in (0.9, {"target": 0.9}):
        made = parse({"sparseprefill": {"method": "streaming", "recall": given}}).build()
        assert isinstance(made, sp.Pipeline)
        assert (FLOOR,) == made.refiners
    with pytest.raises(ParameterError, match=r"^sparseprefill\.recall is 2: pass a number from 0 to 1"):
        parse({"sparseprefill": {"method": "streaming", "recall": 2}}).build()


def test_compare_and_fit_take_a_floor_for_every_method(folder: Path) -> None:
    own = ("--model", str(folder), *SMALL, *SETS, "--tokens", "400", "--count", "1")
    densities = []
    for more in ((), ("--recall-floor", "0.95")):
        result = CliRunner().invoke(app, ["compare", *own, "--greedy", "4", "--tail", "0", "--json", *more])
        assert 0 == result.exit_code, result.output
        facts = json.loads(result.stdout)
        densities.append(facts["methods"][1]["density"])
    assert 0.95 == facts["recall_floor"]
    assert {"sink": 16, "window": 16, "block": 16, "recall": 0.95} == facts["methods"][1]["parameters"]
    assert densities[0] < densities[1]
    fit = ["fit", *own, "--kl", "9", "--recall-floor", "0.3", "--tail", "0", "--minutes", "1", "-o", "p.json"]
    result = CliRunner().invoke(app, fit)
    assert 0 == result.exit_code, result.output
    (only,) = Profile.load("p.json").ranges
    assert only.parameters is not None
    assert 0.3 == only.parameters["recall"]
    (one,) = sp.Route.of(sp.build(profile="p.json")).known
    assert (sp.RecallFloor(target=0.3),) == one.refiners


def test_frontier_tries_several_floors(folder: Path) -> None:
    small = ("--tokens", "600", "--questions", "1", "--rounds", "1", "--most", "1", "--seconds", "0.01")
    tried = (*SETS, "--try", "streaming.recall=0.5,0.95")
    result = CliRunner().invoke(frontier, ["--model", str(folder), *SMALL, *small, *tried, "--json", "-"])
    assert 0 == result.exit_code, result.output
    found = [one["parameters"] for one in json.loads(result.stdout)["points"]]
    assert [{"sink": 16, "window": 16, "block": 16, "recall": x} for x in (0.5, 0.95)] == found


@pytest.mark.thorough
def test_demo_and_fit_take_a_floor() -> None:
    densities = []
    for more in ((), ("--recall-floor", "0.99")):
        small = ("--tokens", "512", "--questions", "1", "--tail", "0", "--device", "cpu", "--threads", "1", "--json")
        result = CliRunner().invoke(app, ["demo", "--method", "streaming", *NARROW, *small, *more])
        assert 0 == result.exit_code, result.output
        facts = json.loads(result.stdout)
        densities.append(facts["methods"][1]["density"])
    assert 0.99 == facts["recall_floor"]
    assert densities[0] < densities[1]
    tried = ("--try", "window=16,64", "--kl", "9", "--count", "1", "--tokens", "512")
    options = ("--device", "cpu", "--tail", "0", "--recall-floor", "0.4", "--output", "p.json")
    result = CliRunner().invoke(app, ["fit", "--method", "streaming", *tried, *options])
    assert 0 == result.exit_code, result.output
    (only,) = Profile.load("p.json").ranges
    assert only.parameters is None or 0.4 == only.parameters["recall"]
    (one,) = sp.Route.of(sp.build(profile="p.json")).known
    assert (sp.RecallFloor(target=0.4),) == one.refiners
