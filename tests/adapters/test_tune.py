"""The tuner: what it chooses, what it writes, what attach makes of it, and how the command fails."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from sparseprefill.adapters.calibration.candidates import Candidate, settings
from sparseprefill.adapters.calibration.fit import ranges
from sparseprefill.adapters.calibration.search import Search, Searcher
from sparseprefill.adapters.calibration.target import Target
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.evaluation.outcome import Contender, Layer, Outcome
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.identity import identity
from typer.testing import CliRunner, Result

import sparseprefill as sp
from sparseprefill.profiles.profile import Profile

from .hf_models import build, prompt
from .test_cli import refused

pytestmark = pytest.mark.usefixtures("_one_tokenizer")
STREAMING = evolve(sp.default_registry().get("streaming"), search={"window": (8, 16, 32), "sink": (0, 8)})


def answers(right: int, asked: int, density: float, seconds: float, error: str = "") -> Outcome:
    if error:
        return Outcome(Contender("x"), "p", error=error)
    layer = Layer(0, density, (density,))
    return Outcome(Contender("x"), "p", 64, None, seconds, layers=(layer,), answers={"all": (right, asked)})


@frozen
class Made:
    """Made-up figures by window: right answers of 100, dense has 90; density grows with the window."""

    right: dict[int, int]
    density: dict[int, float] = field(factory=dict)
    stock_right: int = 90
    count: int = 1

    def stock(self, prompt: int) -> Outcome:
        return answers(self.stock_right, 100, 1.0, 1.0)

    def run(self, candidate: Candidate, prompt: int) -> Outcome:
        window: int = candidate.parameters["window"]
        right = self.right.get(window, 0)
        density = self.density.get(window, window / 100)
        return answers(right, 100, density, 3.0 / window, "broken" if right < 0 else "")


def searched(made: Made, values: dict[str, Any] | None = None, tokens: int = 1024, **options: Any) -> Search:
    loss = options.pop("loss", 0.01)
    tried = [Candidate(STREAMING, one) for one in settings(STREAMING, values or {"sink": [0]})]
    return Searcher(tokens, tried, made, Target(loss=loss), rungs=(1,), repair=False, **options).run()


def chosen(right: dict[int, int], **options: Any) -> dict[str, Any] | None:
    found = searched(Made(right), **options).chosen
    return None if found is None else dict(found.candidate.parameters)


def test_the_cheapest_setting_within_the_loss_is_chosen() -> None:
    right = {8: 80, 16: 89, 32: 90}
    assert {"window": 32, "sink": 0} == chosen(right)
    assert {"window": 16, "sink": 0} == chosen(right, loss=0.012)
    assert {"window": 8, "sink": 0} == chosen(right, loss=0.12)
    assert {"window": 32, "sink": 0} == chosen(right, loss=0.12, by="seconds")


def test_a_loss_that_is_met_exactly_is_met() -> None:
    assert {"window": 16, "sink": 0} == chosen({16: 81}, loss=0.1)


def test_no_setting_within_the_loss_and_settings_that_fail_are_left_out() -> None:
    assert chosen({8: 50, 16: 50, 32: 50}) is None
    assert {"window": 32, "sink": 0} == chosen({8: -1, 16: -1, 32: 90})


def test_of_equal_cost_the_nearer_then_the_earlier_wins() -> None:
    made = Made({8: 90, 16: 95, 32: 95}, {8: 0.5, 16: 0.5, 32: 0.5})
    found = searched(made, {"sink": [4]}, loss=0.2).chosen
    assert found is not None
    assert {"window": 8, "sink": 4} == found.candidate.parameters  # nothing is lost: the first of equals
    found = searched(Made({8: 80, 16: 85, 32: 85}, made.density), {"sink": [4]}, loss=0.2).chosen
    assert found is not None
    assert {"window": 16, "sink": 4} == found.candidate.parameters


def test_a_model_that_fails_the_tasks_cannot_be_tuned_on_them() -> None:
    with pytest.raises(sp.ParameterError, match="0 of 100 answers are right"):
        searched(Made({}, stock_right=0))
    with pytest.raises(sp.ParameterError, match="loss is 1"):
        Target(loss=1.0)


def test_settings_are_the_product_of_the_search_space() -> None:
    assert len(settings(STREAMING)) == 6
    assert [{"block": 4, "sink": 0, "window": 8}] == settings(STREAMING, {"window": [8]}, {"block": 4, "sink": 0})
    with pytest.raises(sp.ParameterError, match="dense declares no search space"):
        settings(sp.default_registry().get("dense"))
    with pytest.raises(sp.ParameterError, match="streaming has no parameter 'windov'"):
        settings(STREAMING, {"windov": [1]})
    with pytest.raises(sp.ParameterError, match="window is 0"):
        settings(STREAMING, {"window": [8, 0]})
    with pytest.raises(sp.ParameterError, match="values to try of window are"):
        settings(STREAMING, {"window": []})


@pytest.mark.parametrize("name", [name for name, one in sp.default_registry().methods().items() if one.search])
def test_declared_search_spaces_fit_their_methods(name: str) -> None:
    method = sp.default_registry().get(name)
    assert 1 < len(settings(method)) <= 100


def test_ranges_meet_half_way() -> None:
    found = [searched(Made({8: 90 * (tokens < 3000)}), tokens=tokens) for tokens in (4096, 1024, 2048)]
    made = ranges(found)
    assert [0, 1536, 3072] == [one.least for one in made]
    assert [{"window": 8, "sink": 0}] * 2 + [None] == [one.parameters for one in made]
    assert ["streaming", "streaming", None] == [one.method for one in made]


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Any, Path]:
    """A tiny random model, and a profile made for it."""
    model = build("llama")
    method = sp.default_registry().get("streaming")
    one = Candidate(method, {"sink": 8, "window": 16, "block": 8})
    found = Searcher(64, [one], Made({16: 90}), Target(loss=0.1)).run()
    profile = Profile(methods=("streaming",), model=identity(model.get_decoder()), ranges=ranges([found]))
    path = tmp_path / "tiny.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    return model, path


@torch.no_grad()
def test_attach_takes_a_profile_of_this_model(tiny: tuple[Any, Path]) -> None:
    model, path = tiny
    ids = prompt(90)
    with attach(model, "streaming", tail=0, sink=8, window=16, block=8):
        expected = model(ids).logits
    with attach(model, "streaming", tail=0, profile=path, strict=True) as handle:
        assert torch.equal(expected, model(ids).logits)
    assert all(layer.mode == "sparse" for layer in handle.report().layers)


def test_attach_refuses_a_profile_of_another_model_or_method(tiny: tuple[Any, Path]) -> None:
    model, path = tiny
    with pytest.raises(sp.ParameterError, match=r"made for another model: model\.layers is 2"):
        attach(build("llama", num_hidden_layers=3), "streaming", profile=path)
    with pytest.raises(sp.ParameterError, match=r"model.digest .* tune this one"):
        attach(build("llama", intermediate_size=64), "streaming", profile=path)
    with pytest.raises(sp.ParameterError, match="not for 'dense'"):
        attach(model, "dense", profile=path)
    with pytest.raises(sp.ParameterError, match="pass a profile with the name"):
        attach(model, sp.build("dense"), profile=path)


@torch.no_grad()
def test_a_length_without_a_setting_runs_dense_and_says_so(tiny: tuple[Any, Path]) -> None:
    model, path = tiny
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["ranges"][0] |= {"method": None, "parameters": None}
    path.write_text(json.dumps(facts), encoding="utf-8")
    expected = model(prompt(90)).logits
    with attach(model, "streaming", tail=0, profile=path, strict=True) as handle:  # a choice, and no failure
        assert torch.equal(expected, model(prompt(90)).logits)
    assert any("may never run" in note for note in handle.report().notes)
    assert any("accurate enough" in reason for layer in handle.report().layers for reason in layer.reasons)


@torch.no_grad()
@pytest.mark.parametrize("dense", [0, 1])
def test_a_layer_that_the_profile_keeps_dense_leaves_the_others_sparse(tiny: tuple[Any, Path], dense: int) -> None:
    model, path = tiny
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["ranges"][0]["dense_layers"] = [dense]
    path.write_text(json.dumps(facts), encoding="utf-8")
    with attach(model, "streaming", sink=8, window=16, block=8, layers=[1 - dense]):
        expected = model(prompt(90)).logits
    with attach(model, profile=path, strict=True) as handle:
        assert torch.equal(expected, model(prompt(90)).logits)
    modes = {layer.layer: layer.mode for layer in handle.report().layers}
    assert {dense: "dense", 1 - dense: "sparse"} == modes
    (reason,) = handle.report().layers[dense].reasons
    assert f"the profile keeps layer {dense} dense" in reason


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments])


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SMALL = ("--tokens", "1024", "--texts", "1", "--questions", "1", "--device", "cpu")


@pytest.mark.usefixtures("_elsewhere")
def test_the_command_writes_a_profile_of_the_embedded_model() -> None:
    options = ("--try", "alpha_c=0.01,0.9", "--set", "alpha_s=0.5", "--set", "chunk_n=1", "--set", "block=64")
    result = run("--method", "sample-attention", *SMALL, *options, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    (found,) = facts["searches"]
    assert [0.01, 0.9] == [one["parameters"]["alpha_c"] for one in found["trials"]]
    least = min(
        (one for one in found["trials"] if one["end"]["right"] >= 0.99 * found["dense"]["end"]["right"]),
        key=lambda one: one["density"],
    )
    assert least == found["chosen"]
    profile = Profile.load(facts["profile"])
    assert ("sample-attention", "embedded", "density") == (*profile.methods, profile.model.name, profile.tuned["by"])
    assert {"sparseprefill", "python", "torch", "transformers"} == set(profile.versions)
    assert least["parameters"] == profile.ranges[0].parameters
    assert profile.ranges[0].measured["end"]["asked"] == found["dense"]["end"]["asked"]
    sp.build("sample-attention", profile=facts["profile"])


@pytest.mark.usefixtures("_elsewhere")
def test_the_table_names_what_runs_dense() -> None:
    result = run("--method", "streaming", *SMALL, "--try", "window=1", "--set", "sink=0", "--loss", "0")
    assert result.exit_code == 0, result.output
    assert "a loss of at most 0 of the answers: no setting reaches it" in " ".join(result.stdout.split())
    assert "profile: streaming.profile.json" in result.stdout


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "sample"), ("no method is named 'sample'",)),
        (("--method", "dense"), ("dense declares no search space",)),
        (("--method", "anchor-attention", "--try", "theta"), ("--try theta", "parameter=value")),
        (("--method", "anchor-attention", "--try", "teta=1"), ("no parameter 'teta'",)),
        (("--method", "anchor-attention", "--set", "theta=1", "--try", "theta=1,2"), ("--set theta", "--try")),
        (("--method", "anchor-attention", "--output", "no/such.json"), ("--output no/such.json", "no folder")),
        (("--method", "anchor-attention", "--model", "/no/such/folder"), ("--model /no/such/folder",)),
        (("--method", "anchor-attention", "--tokens", "99999"), ("--tokens 99999", "reads at most")),
        (("--method", "anchor-attention", "--tokens", "256", "--questions", "9"), ("--questions 9", "more tokens")),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(run("--device", "cpu", *arguments), *words)
