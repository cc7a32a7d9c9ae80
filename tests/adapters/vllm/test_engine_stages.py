"""Layers spread over two stages, one behind the other (pipeline parallelism), and heads over two processes in each
(tensor parallelism beside it): tokens are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
PROMPTS = [models.prompt(length, seed=length) for length in (500, 300, 40)]
EVERY_KEY = {"method": "dense", "min_query": 32}
SPARSE = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}, "min_query": 32, "tail": 32}
CHUNKS = {"max_num_batched_tokens": 128, "enable_prefix_caching": True}
TWO = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "adapters.vllm.stages.Stages",
}
FOUR = {**TWO, "tensor_parallel_size": 2}
JOBS: dict[str, dict[str, Any]] = {
    "stock": {"options": CHUNKS},
    "every key in two": {"sparse": EVERY_KEY, "options": {**CHUNKS, **TWO}},
    "sparse": {"sparse": SPARSE, "options": CHUNKS},
    "sparse in two": {"sparse": SPARSE, "options": {**CHUNKS, **TWO}},
    "every key in four": {"sparse": EVERY_KEY, "options": {**CHUNKS, **FOUR}},
    "sparse in four": {"sparse": SPARSE, "options": {**CHUNKS, **FOUR}},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every job by name; prompts come twice, the second time behind their own keys."""
    folder = tmp_path_factory.mktemp("stages")
    model = str(models.save("llama", folder / "llama"))
    asked = [{"model": model, "rounds": [PROMPTS, PROMPTS], "tokens": 6, **job} for job in JOBS.values()]
    return dict(zip(JOBS, engine.run(asked, folder), strict=True))


@pytest.mark.parametrize("turn", [0, 1])
def test_tokens_are_those_of_one_process(answers: dict[str, Any], turn: int) -> None:
    found = {name: engine.tokens(one, turn) for name, one in answers.items()}
    assert found["stock"] == found["every key in two"] == found["every key in four"]
    assert found["sparse"] == found["sparse in two"] == found["sparse in four"]
    assert found["sparse"] != found["stock"]


def test_each_process_reports_its_own_layers(answers: dict[str, Any]) -> None:
    whole, stages = answers["sparse"]["report"]["layers"], answers["sparse in two"]["reports"]
    assert [[one["layer"] for one in stage["layers"]] for stage in stages] == [[0, 1], [2]]
    assert [one["sparse_calls"] for one in whole] == [
        one["sparse_calls"] for stage in stages for one in stage["layers"]
    ]
