"""Models of which nothing can run sparse: said when the engine starts, and in the report; wrong options end it."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sparseprefill.adapters.vllm.options import SCHEDULER
from sparseprefill.adapters.vllm.start import EXTENSION

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
STREAMING = {"method": "streaming", "min_query": 32}
SLIDING = {"layer_types": ["sliding_attention"] * 4}
# Made for its model, what the engine is told, and why nothing runs sparse.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gemma3": (SLIDING, {}, "the layer has a sliding window"),
    "bert": (
        {"max_position_embeddings": 512},
        {"runner": "pooling", "skip_tokenizer_init": False, "max_model_len": 512},
        "the layer is of type encoder_only, not a causal decoder's",
    ),
}


def test_it_is_said_at_start_and_in_the_report(tmp_path: Path) -> None:
    jobs = []
    for family, (changes, options, _) in MODELS.items():
        model = str(models.save(family, tmp_path / family, **changes))
        jobs.append({"model": model, "rounds": [[models.prompt(200)]], "options": options, "sparse": STREAMING})
    answers = engine.run(jobs, tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "for prefill chunks of" not in log, "no claim"
    for (_, _, why), answer in zip(MODELS.values(), answers, strict=True):
        assert "error" not in answer, answer["error"]
        text = f"streaming is selected, but nothing can run sparse: {why}"
        assert {text: 1} == answer["report"]["notes"]
        assert text in answer["report"]["text"]
        assert text in log
        assert 0 == sum(layer["sparse_calls"] for layer in answer["report"]["layers"])


WRONG = {**STREAMING, "parameters": {"sink": -1}}
NAMED = {"worker_extension_cls": EXTENSION, "additional_config": {"sparseprefill": WRONG}}
JOBS: dict[str, dict[str, Any]] = {
    "no attention": {"family": "mamba", "sparse": WRONG},
    "latent attention, the backend of others": {"family": "deepseek", "sparse": WRONG},
    "the backend of latent attention, another model": {"family": "llama", "latent": True, "sparse": WRONG},
    "the report alone": {"family": "llama", "options": NAMED},
    "the scheduler alone": {
        "family": "llama",
        "options": {"scheduler_cls": SCHEDULER, "additional_config": {"sparseprefill": {**WRONG, "chunk": 256}}},
    },
}
"""Flags that name us, and models that have no use for them."""


def test_wrong_options_end_its_start_ahead_of_the_weights(tmp_path: Path) -> None:
    for family in {job["family"] for job in JOBS.values()}:
        for weights in models.save(family, tmp_path / family).glob("*.safetensors"):
            weights.unlink()
    jobs = [{**job, "model": str(tmp_path / job["family"]), "rounds": []} for job in JOBS.values()]
    said = {name: answer["error"] for name, answer in zip(JOBS, engine.run(jobs, tmp_path), strict=True)}
    wanted = "ParameterError: sparseprefill.parameters.sink is -1: pass an integer >= 0"
    assert dict.fromkeys(JOBS, wanted) == said
