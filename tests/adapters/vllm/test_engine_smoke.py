"""What every version of vLLM must do, in one process: `tox -e vllm-29` and its like run this file alone.

Equal tokens at a mask of every key, a sparse method, chunks with fixed bounds, requests that ask for a profile.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
FIXED = "sparseprefill.adapters.vllm.scheduler.fixed_chunks"
# Chooses among all keys that a chunk has, so that what it selects depends on where the chunk ends.
VERTICAL = {"method": "vertical-slash", "parameters": {"gamma": 0.3}, "min_query": 32, "tail": 32}
STREAMING = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}, "min_query": 32, "tail": 0}
PROMPT, COMPANY = models.prompt(500, seed=1), [models.prompt(length, seed=length) for length in (150, 333, 90, 70)]
STEP = {"max_num_batched_tokens": 192, "max_num_seqs": 8}
TOGETHER = [*COMPANY[:2], PROMPT, *COMPANY[2:]]
ALONE_AND_TOGETHER = {"rounds": [[PROMPT], TOGETHER], "prompt_logprobs": 0, "tokens": 2, "options": STEP}
JOBS: dict[str, dict[str, Any]] = {
    "stock": {"rounds": [TOGETHER]},
    "full": {"rounds": [TOGETHER], "sparse": {"method": "diary", "min_query": 32}},
    "streaming": {"rounds": [TOGETHER], "sparse": {**STREAMING, "log_interval": 0.05}},
    "as the step has room": {**ALONE_AND_TOGETHER, "sparse": VERTICAL},
    "fixed": {
        **ALONE_AND_TOGETHER,
        "sparse": {**VERTICAL, "chunk": 128},
        "options": {**STEP, "scheduler_cls": FIXED},
    },
    "fixed, step by step": {
        **ALONE_AND_TOGETHER,
        "sparse": {**VERTICAL, "chunk": 128},
        "options": {**STEP, "scheduler_cls": FIXED, "async_scheduling": False},
    },
    "asked": {
        "rounds": [[PROMPT, PROMPT, PROMPT], [PROMPT, PROMPT]],
        "asked": [["off", None, "all"], ["off", None]],
        "refused": ["fast", "of", 3, {"sparsprefill": "off"}],
        "sparse": {**STREAMING, "profiles": {"all": {"method": "dense", "gate": False}}},
        "options": {"enable_prefix_caching": True},
    },
    "unseen": {
        "unseen": True,
        "rounds": [[PROMPT], [PROMPT, PROMPT], [PROMPT]],
        "asked": [[None], ["off", "fast"], [{"sparsprefill": "off"}]],
        "sparse": STREAMING,
        "options": {"enable_prefix_caching": True},
    },
    "no scheduler": {"rounds": [[PROMPT]], "sparse": {**STREAMING, "chunk": 128}},
    "no room": {
        "rounds": [[PROMPT]],
        "sparse": {**STREAMING, "chunk": 192},
        "options": {**STEP, "scheduler_cls": FIXED},
    },
    "between grains": {
        "rounds": [[PROMPT]],
        "sparse": {**STREAMING, "method": "anchor-attention", "parameters": {}, "chunk": 100},
        "options": {"scheduler_cls": FIXED},
    },
    "wrong profile": {
        "rounds": [[PROMPT]],
        "sparse": {**STREAMING, "profiles": {"quick": {"method": "streaming", "parameters": {"sinc": 3}}}},
    },
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every job by name, all in one process."""
    folder = tmp_path_factory.mktemp("smoke")
    model = str(models.save("llama", folder / "llama"))
    found = engine.run([{"model": model, "tokens": 6, **job} for job in JOBS.values()], folder)
    return {**dict(zip(JOBS, found, strict=True)), "log": (folder / "log.txt").read_text()}


def test_a_mask_of_every_key_gives_the_hosts_tokens(answers: dict[str, Any]) -> None:
    assert engine.tokens(answers["stock"]) == engine.tokens(answers["full"])
    assert engine.tokens(answers["stock"]) != engine.tokens(answers["streaming"])
    assert all(layer["sparse_calls"] == len(TOGETHER) for layer in answers["streaming"]["report"]["layers"])


def test_this_vllms_metadata_are_known(answers: dict[str, Any]) -> None:
    assert "batches whose metadata say something" not in answers["log"]


def test_the_summary_is_logged(answers: dict[str, Any]) -> None:
    assert "sparseprefill: prefill chunks of the last " in answers["log"]
    assert "no layer can run sparse" not in answers["log"], "a step that is under way is none of a line"
    # How chunks fall into lines is the clock's: a chunk of the warm-up may share one.
    assert re.search(r"[1-9]\d* sparse, \d+ dense[^\n]*, mean density 0\.\d{3}", answers["log"])
    counters = answers["full"]["state"]["counters"]
    assert len(TOGETHER) == counters["sparseprefill:prefill_chunks_total[('mode', 'sparse')]"], "not times the layers"
    assert sum(map(len, TOGETHER)) == counters["sparseprefill:prefill_tokens_total[('mode', 'sparse')]"]


def moved(answer: dict[str, Any]) -> float:
    """The most by which a log probability of the prompt differs, alone and in company."""
    alone, together = answer["rounds"][0][0]["prompt"], answer["rounds"][1][2]["prompt"]
    assert len(PROMPT) - 1 == len(alone) == len(together)
    return float(max(abs(a - b) for a, b in zip(alone, together, strict=True)))


@pytest.mark.parametrize("name", ["fixed", "fixed, step by step"])
def test_a_request_does_not_depend_on_its_company(answers: dict[str, Any], name: str) -> None:
    assert moved(answers["as the step has room"]) > 0.01, "without fixed bounds it does"
    assert moved(answers[name]) < 1e-3
    assert engine.tokens(answers[name], 0)[0] == engine.tokens(answers[name], 1)[2]


def test_a_request_asks_for_dense_attention_or_a_profile(answers: dict[str, Any]) -> None:
    stock, sparse = engine.tokens(answers["stock"])[2], engine.tokens(answers["streaming"])[2]
    off, default, full = engine.tokens(answers["asked"])
    assert (stock, sparse, stock) == (off, default, full)
    assert [stock, sparse] == engine.tokens(answers["asked"], 1), "each finds its own in the prefix cache"
    report = answers["asked"]["report"]
    assert any("the request asks for it (sparseprefill: off)" in note for note in report["notes"])
    assert all(layer["sparse_calls"] == 1 for layer in report["profiles"]["all"]["layers"])


def test_a_profile_that_is_not_there_is_refused(answers: dict[str, Any]) -> None:
    assert "error" not in answers["asked"]
    fast, of, three, mistyped = answers["asked"]["refusals"]
    assert "VLLMValidationError: sparseprefill is 'fast', which is not a profile of this engine" in fast
    assert "did you mean 'off'? Known: all, off" in of
    assert "sparseprefill is 3" in three
    assert "'sparsprefill' is no argument of a request; did you mean 'sparseprefill'?" in mistyped


def test_a_front_end_that_looks_at_nothing_mixes_no_keys(answers: dict[str, Any]) -> None:
    """As vLLM's in Rust, which this wheel lacks: none of its requests pass through InputProcessor.process_inputs."""
    stock, sparse = engine.tokens(answers["stock"])[2], engine.tokens(answers["streaming"])[2]
    unseen = answers["unseen"]
    assert [[sparse], [stock, stock], [stock]] == [engine.tokens(unseen, turn) for turn in range(3)]
    for why in ("(sparseprefill: off)", "a profile that this engine does not have", "looks like sparseprefill"):
        assert [count for note, count in unseen["report"]["notes"].items() if why in note] == [1]
    assert answers["log"].count("a request runs dense: sparseprefill is 'fast'") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no scheduler", f"add --scheduler-cls {FIXED}"),
        ("no room", "sparseprefill.chunk is 192: beside 8 requests (--max-num-seqs) a step of 192 tokens"),
        ("between grains", "sparseprefill.chunk is 100: sparseprefill (anchor-attention) has a grain of"),
        ("wrong profile", "sparseprefill.profiles.quick.parameters.sinc is unknown; did you mean 'sink'"),
    ],
)
def test_what_cannot_be_stops_the_start(answers: dict[str, Any], name: str, words: str) -> None:
    assert words in answers[name]["error"], json.dumps(answers[name])[:2000]
