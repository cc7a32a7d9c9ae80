"""The commands that count model types and time what being attached costs."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import os

import pytest

from helpers import model_types
from helpers.model_types import Found, examine
from helpers.tiny import config_of
from lab import overhead

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_type_that_is_equal() -> None:
    found = examine("gemma3_text")
    assert ("equal", "", "Gemma3ForCausalLM", "sdpa") == (found.state, found.why, found.model, found.implementation)
    assert {"sparse": 1, "window": 1} == found.layers == found.sparse
    assert found.error is not None
    assert found.error < 1e-5


@pytest.mark.parametrize("model_type", ["qwen3_next", "granitemoehybrid", "jamba"])
def test_a_hybrid_runs_sparse_in_its_layer_of_attention(model_type: str) -> None:
    found = examine(model_type)
    assert ("equal", "") == (found.state, found.why)
    assert {"sparse": 1} == found.layers == found.sparse


@pytest.mark.parametrize(
    ("model_type", "state", "why"),
    [
        ("bloom", "refused", "does not use transformers' AttentionInterface"),
        ("gemma4_assistant", "not built", "Error"),
        ("llammma", "not built", "KeyError"),
    ],
)
def test_types_that_are_not(model_type: str, state: str, why: str) -> None:
    found = examine(model_type)
    assert state == found.state
    assert why in found.why


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_types, "TOLERANCE", 0.0)
    assert "differs" == examine("llama", "eager").state
    monkeypatch.undo()
    monkeypatch.setattr(model_types, "STREAMING", {"sink": 16, "window": 16, "block": 512})
    assert "a sparse mask changes nothing" in examine("llama").why


def test_a_process_that_takes_too_long_or_dies_is_one_type_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "took more than 0.01 s" == model_types.apart("llama", limit=0.01).why
    monkeypatch.setattr(model_types, "examine", lambda *_: os._exit(7))
    lost = model_types.apart("llama")
    assert ("failed", "its process ended with code 7") == (lost.state, lost.why)


def test_one_layer_of_each_kind() -> None:
    assert ["sliding_attention", "full_attention"] == config_of("gemma3_text").layer_types
    small = config_of("llama")
    assert (2, 4, 64) == (small.num_hidden_layers, small.num_attention_heads, small.hidden_size)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    states = {"a": Found("a", "equal", sparse={"sparse": 2}), "b": Found("b", "refused", "why | not")}
    monkeypatch.setattr(model_types, "apart", lambda name, *_: states[name])
    monkeypatch.setattr(model_types, "model_types", lambda: ["a", "b"])
    assert 0 == model_types.main([])
    out = capsys.readouterr().out
    assert "| b | refused |  |  | why / not |" in out
    assert "| a | equal |  | 2 sparse |  |" in out
    assert "2 types: 1 equal, 1 refused, 0 not built, 0 differs, 0 failed" in out
    assert 0 == model_types.main(["b", "--json"])
    assert ["b"] == [one["model_type"] for one in json.loads(capsys.readouterr().out)]
    states["b"] = Found("b", "differs")
    assert 1 == model_types.main([])


def test_every_type_is_in_the_list() -> None:
    assert {"llama", "gpt2", "deepseek_v3"} < set(model_types.model_types())


def test_overhead_is_timed_where_all_runs_dense(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == overhead.main(["--layers", "2", "--tokens", "32", "--rounds", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (2, 32, 2) == (found["layers"], found["tokens"], found["rounds"])
    assert found["stock"] > 0
