"""Heads spread over two GPUs: the engine's tokens are those of one GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from . import engine, models

pytestmark = [
    engine.NEEDED,
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LENGTHS = (1700, 517, 1203, 40)
COMMON = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"custom_ops": ["none"]},
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 256 << 20,
    "block_size": 16,
}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
FULL = {"method": "dense", "min_query": 32}
BFLA = {"method": "bfla", "min_query": 32, "tail": 32}
ROWMAX = {"method": "rowmax", "min_query": 32, "tail": 32}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parallel")
    model = models.save("llama", folder / "model", hidden_size=256, head_dim=64)
    rounds = [[models.prompt(length, seed=length) for length in LENGTHS]]
    jobs = {
        "full": {"options": COMMON, "sparse": FULL},
        "full on two": {"options": {**COMMON, **TWO}, "sparse": FULL},
        "bfla": {"options": COMMON, "sparse": BFLA},
        "bfla on two": {"options": {**COMMON, **TWO}, "sparse": BFLA},
        "rowmax": {"options": COMMON, "sparse": ROWMAX},
        "rowmax on two": {"options": {**COMMON, **TWO}, "sparse": ROWMAX},
    }
    given = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    given["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    asked = [{"model": str(model), "rounds": rounds, **job} for job in jobs.values()]
    return dict(zip(jobs, engine.run(asked, folder, **given), strict=True))


@pytest.mark.parametrize("name", ["full", "bfla", "rowmax"])
def test_two_gpus_give_the_tokens_of_one(answers: dict[str, Any], name: str) -> None:
    """`test_engine_equal` and the bench's `equal` compare one GPU with vLLM's own attention."""
    assert engine.tokens(answers[name]) == engine.tokens(answers[f"{name} on two"])


@pytest.mark.parametrize("name", ["full on two", "bfla on two", "rowmax on two"])
def test_each_layer_ran_sparse(answers: dict[str, Any], name: str) -> None:
    layers = answers[name]["report"]["layers"]
    assert [one["layer"] for one in layers] == [0, 1, 2]
    assert all(one["sparse_calls"] for one in layers)
