"""Sparse methods in the engine: densities, memory by request, fallbacks and what is refused at start."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tables import point, shape_of, table

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
WINDOW = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}, "min_query": 32}
STREAMING = {**WINDOW, "tail": 0}
LONG = [models.prompt(length, seed=length) for length in (700, 450, 20)]
TWO = [models.prompt(length, seed=length) for length in (300, 200)]

JOBS: dict[str, dict[str, Any]] = {
    "stock": {"rounds": [LONG]},
    "streaming": {"rounds": [LONG], "sparse": {**STREAMING, "measure": True}},
    "with its tail": {"rounds": [LONG], "sparse": WINDOW},
    "with its tail in chunks": {"rounds": [LONG], "sparse": WINDOW, "options": {"max_num_batched_tokens": 256}},
    "in chunks": {"rounds": [LONG], "sparse": STREAMING, "options": {"max_num_batched_tokens": 256}},
    "two at once": {
        "rounds": [TWO],
        "sparse": {"method": "diary", "min_query": 32},
        "options": {"max_num_batched_tokens": 128},
    },
    "preempted": {
        "rounds": [[models.prompt(150, seed=n) for n in range(4)]],
        "sparse": {"method": "diary", "min_query": 32},
        "options": {"num_gpu_blocks_override": 17, "max_model_len": 256, "block_size": 32},
        "tokens": 45,
    },
    "there": {"rounds": [LONG], "logprobs": 1},
    "some layers": {"rounds": [TWO], "sparse": {**STREAMING, "layers": [1]}},
    "hybrid": {
        "rounds": [TWO],
        "sparse": {
            "union": [
                {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}},
                {"method": "vertical-slash", "parameters": {"gamma": 0.5}},
            ],
            "refiners": [{"name": "stride-rescue", "every": 4}],
            "min_query": 32,
        },
    },
    "shares": {
        "rounds": [TWO],
        "sparse": {"method": "share-prefill", "parameters": {"clusters": "single"}, "min_query": 32},
    },
    "objects": {"rounds": [TWO], "sparse": {"method": "share-prefill", "min_query": 32}},
    "broken": {"rounds": [TWO], "sparse": {"method": "broken", "min_query": 32}},
    "long chunks": {"rounds": [TWO], "sparse": {**STREAMING, "min_query": 4096}},
    "strict about chunks": {"rounds": [TWO], "sparse": {**STREAMING, "min_query": 4096, "strict": True}},
    "no method": {"rounds": [TWO], "sparse": {"min_query": 32}},
    "wrong parameter": {"rounds": [TWO], "sparse": {"method": "streaming", "parameters": {"sinc": 3}}},
    "strict": {"rounds": [TWO], "sparse": {"method": "share-prefill", "strict": True}},
}
GATED: dict[str, Any] = {
    "rounds": [[models.prompt(length, seed=length)] for length in (700, 300)],
    "options": {"max_num_batched_tokens": 256},
}
"""One prompt after the other, in steps of 256 tokens."""
TIMES = (
    point(128, 128, streaming=4.0),
    *(point(256, n, streaming=r) for n, r in ((256, 3.0), (512, 0.5), (1024, 0.3))),
)
"""Of the first step alone streaming makes a loss."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every job by name, all in one process."""
    folder = tmp_path_factory.mktemp("sparse")
    model = str(models.save("llama", folder / "llama"))
    gate = folder / "table.json"
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32}
    gate.write_text(table(shape_of(*TIMES, point(1024, 1024, streaming=0.2), **sizes)).to_json(), encoding="utf-8")
    every = {**JOBS, "gated": {**GATED, "sparse": {**STREAMING, "gate": str(gate)}}}
    jobs = [{"model": model, "tokens": 6, **job} for job in every.values()]
    found: dict[str, Any] = dict(zip(every, engine.run(jobs, folder), strict=True))
    return {**found, "log": (folder / "log.txt").read_text()}


def test_a_sparse_method_reports_its_densities(answers: dict[str, Any]) -> None:
    stock, sparse = engine.tokens(answers["stock"]), engine.tokens(answers["streaming"])
    assert stock[0] != sparse[0]
    assert stock[2] == sparse[2], "shorter than min_query"
    report = answers["streaming"]["report"]
    assert all(0 < layer["mean_density"] < 0.6 and layer["density"] < 1 for layer in report["layers"])
    assert 1 == report["short_forwards"]
    counters = answers["streaming"]["state"]["counters"]
    computed, causal = (
        counters[f"sparseprefill:pairs_total[('kind', '{kind}'), ('layers', '2')]"] for kind in ("computed", "causal")
    )
    assert 0 < computed < causal


def test_chunks_at_the_grain_change_nothing(answers: dict[str, Any]) -> None:
    assert engine.tokens(answers["streaming"]) == engine.tokens(answers["in chunks"])
    assert answers["in chunks"]["report"]["density"] == pytest.approx(
        answers["streaming"]["report"]["density"], abs=0.2
    )


def test_the_last_rows_of_each_prompt_get_every_key(answers: dict[str, Any]) -> None:
    whole, chunks = answers["with its tail"], answers["with its tail in chunks"]
    assert engine.tokens(whole) == engine.tokens(chunks)
    assert engine.tokens(whole) != engine.tokens(answers["streaming"])
    bare = answers["streaming"]["report"]["density"]
    assert bare < whole["report"]["density"] < 0.9
    assert 128 == whole["report"]["tail"]
    assert not any("does not give" in note for note in chunks["report"]["notes"]), "the runner told where prompts end"


def test_chunks_of_a_request_share_its_memory_alone(answers: dict[str, Any]) -> None:
    diary = answers["two at once"]["state"]["diary"]
    offsets: dict[int, list[int]] = {}
    for number, calls, layer, offset, _ in diary:
        offsets.setdefault(number, []).append(offset)
        assert len(offsets[number]) == calls
        assert layer == (calls - 1) % 3
    assert 2 == len(offsets)
    for seen in offsets.values():
        assert sorted(seen) == seen
        assert len(set(seen)) > 1


def test_a_preempted_request_begins_anew(answers: dict[str, Any]) -> None:
    diary = answers["preempted"]["state"]["diary"]
    assert 0 < answers["preempted"]["metrics"]["vllm:num_preemptions"]
    begun = {number for number, _, _, offset, _ in diary if offset == 0}
    assert 4 < len(begun)
    assert all(calls <= 3 for _, calls, _, _, _ in diary)


def test_all_chunks_of_a_prompt_run_sparse_or_dense(answers: dict[str, Any]) -> None:
    """700 tokens gain on the whole, though not in their first step; 300 do not."""
    report = answers["gated"]["report"]
    assert [(3, 2)] * 3 == [(layer["sparse_calls"], layer["dense_calls"]) for layer in report["layers"]]
    (reason,) = report["fallbacks"]
    assert "a prompt of 300 tokens, judged as a whole" in reason


def test_layers_may_be_chosen(answers: dict[str, Any]) -> None:
    modes = [layer["mode"] for layer in answers["some layers"]["report"]["layers"]]
    assert ["dense", "sparse", "dense"] == modes
    assert {"not among the chosen layers": 4} == answers["some layers"]["report"]["fallbacks"]


@pytest.mark.parametrize("name", ["hybrid", "shares"])
def test_other_pipelines_run(answers: dict[str, Any], name: str) -> None:
    assert 2 == len(engine.tokens(answers[name]))
    assert all(layer["sparse_calls"] == 2 for layer in answers[name]["report"]["layers"])


def test_a_method_that_objects_leaves_the_host_its_work(answers: dict[str, Any]) -> None:
    report = answers["objects"]["report"]
    assert 2 == len(engine.tokens(answers["objects"]))
    assert all(layer["mode"] == "dense" for layer in report["layers"])
    assert any("clusters" in reason for reason in report["fallbacks"])
    counters = answers["objects"]["state"]["counters"]
    assert any("fallbacks" in name and "clusters" in name for name in counters)
    (note,) = report["notes"]
    assert "share-prefill is selected, but nothing can run sparse: " in note
    assert "clusters" in note
    assert f"sparseprefill: LlamaForCausalLM: {note}" in answers["log"], "before the first request"


def test_a_broken_stage_ends_no_engine(answers: dict[str, Any]) -> None:
    assert "error" not in answers["broken"]
    assert 2 == len(engine.tokens(answers["broken"]))
    for layer in answers["broken"]["report"]["layers"]:
        assert (0, 2) == (layer["sparse_calls"], layer["dense_calls"])
    ((reason, count),) = answers["broken"]["report"]["fallbacks"].items()
    assert 6 == count
    assert "ZeroDivisionError" in reason
    assert "a bug of the plugin" in reason


def test_chunks_that_never_come_are_said_at_start(answers: dict[str, Any]) -> None:
    (note,) = answers["long chunks"]["report"]["notes"]
    assert "nothing can run sparse: min_query is 4096, but no chunk has more than 2048 tokens" in note
    assert f"sparseprefill: LlamaForCausalLM: {note}" in answers["log"]


def test_each_engine_of_a_process_reports_its_own(answers: dict[str, Any]) -> None:
    started = {name: answers[name] for name in JOBS if answers[name].get("state")}
    assert len(started) > 5
    assert {1} == {answer["state"]["runtimes"] for answer in started.values()}
    assert 3 * 2 == sum(layer["sparse_calls"] for layer in answers["hybrid"]["report"]["layers"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no method", "neither method nor union"),
        ("wrong parameter", "sparseprefill.parameters.sinc is unknown; did you mean 'sink'"),
        ("strict", "strict: these layers would stay dense"),
        ("strict about chunks", "min_query is 4096, but no chunk has more than 2048 tokens"),
    ],
)
def test_wrong_options_stop_the_start(answers: dict[str, Any], name: str, words: str) -> None:
    assert words in answers[name]["error"]


def test_installed_but_not_selected_changes_nothing(answers: dict[str, Any], tmp_path: Path) -> None:
    """In a process without the plugin, and in that of the others, where engines with it came before."""
    job = {"model": str(models.save("llama", tmp_path / "llama")), "rounds": [LONG], "logprobs": 1, "tokens": 6}
    (without,) = engine.run([job], tmp_path, VLLM_PLUGINS="")
    there = answers["there"]
    assert "sparseprefill: " not in (tmp_path / "log.txt").read_text()
    assert "error" not in there, there["error"]
    assert without["rounds"] == there["rounds"], "tokens and log probabilities, to the last bit"
