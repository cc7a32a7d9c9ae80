"""Profiles: settings to choose from, ranges of lengths, and what attach makes of a profile."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.calibration.candidates import Candidate, settings
from sparseprefill.adapters.calibration.fit import ranges
from sparseprefill.adapters.calibration.search import Search, Searcher
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.identity import identity

import sparseprefill as sp
from helpers.hf_models import build, prompt
from sparseprefill.profiles.profile import Profile

from .test_fit import TARGET, Made

pytestmark = pytest.mark.usefixtures("_one_tokenizer")
STREAMING = evolve(sp.default_registry().get("streaming"), search={"window": (8, 16, 32), "sink": (0, 8)})


def searched(kl: dict[int, float], tokens: int = 1024, values: dict[str, Any] | None = None) -> Search:
    """A search over windows of made-up KL, of which at most 0.1 is allowed; density is window / 100."""
    made = Made(lambda one, prompt: kl[one.parameters["window"]], count=1)
    tried = [Candidate(STREAMING, one) for one in settings(STREAMING, values or {"sink": [0]})]
    return Searcher(tokens, tried, made, TARGET).run()


def test_of_equal_cost_the_nearer_then_the_earlier_wins() -> None:
    values = {"sink": [0, 4], "window": [16]}
    found = searched({16: 0.05}, values=values).chosen
    assert found is not None
    assert {"window": 16, "sink": 0} == found.candidate.parameters


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
    found = [searched(dict.fromkeys((8, 16, 32), float(tokens > 3000)), tokens) for tokens in (4096, 1024, 2048)]
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
    found = Searcher(64, [one], Made(lambda one, prompt: 0.0), TARGET).run()
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
    with pytest.raises(sp.ParameterError, match=r"model.digest .* fit this one"):
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
