"""Multi-head latent attention in the real engine: ``mla_prefill_backend`` CUSTOM, over vLLM's own.

On a GPU vLLM has it in 16 bits alone: all jobs are then as roughly equal as the one of bfloat16 on a CPU. There vLLM's
own choice for decoding also computes chunks of up to 512 tokens: one job leaves it, the others decode with Triton.
"""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
MIXED = [models.prompt(length, seed=length) for length in (700, 500, 260, 20)]
LONG = [models.prompt(length, seed=length) for length in (1600, 700)]
SHARED = [models.prompt(length, seed=length, shared=300) for length in (600, 500, 420)]
FULL = {"method": "dense", "min_query": 32}
STREAMING = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}, "min_query": 32, "tail": 0}
PIECES: dict[str, Any] = {
    "pieces": True,
    "rounds": [SHARED, SHARED],
    "options": {"max_num_batched_tokens": 256, "enable_prefix_caching": True},
}
# Each request gets a hundred tokens of a step, so several have a context.
TOGETHER: dict[str, Any] = {
    "pieces": True,
    "rounds": [MIXED],
    "options": {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 100},
}
OWN = "vLLM's own decoding"
JOBS: dict[str, dict[str, Any]] = {
    "whole": {"rounds": [MIXED], "sparse": FULL},
    "bfloat16": {"rounds": [MIXED], "options": {"dtype": "bfloat16"}, "sparse": FULL},
    "some dense": {"rounds": [MIXED], "asked": [["off", None, None, None]], "sparse": FULL},
    "pieces": {**PIECES, "sparse": FULL},
    "pieces, some dense": {**TOGETHER, "asked": [[None, "off", None, None]], "sparse": FULL},
    OWN: {"rounds": [LONG, LONG], "options": {"max_num_batched_tokens": 1024}, "sparse": FULL},
}
"""At a mask of every key."""
SPARSE: dict[str, dict[str, Any]] = {
    "streaming": {"rounds": [MIXED], "sparse": STREAMING},
    "streaming, pieces": {**PIECES, "sparse": STREAMING},
    "vertical-slash": {
        "rounds": [MIXED],
        "sparse": {"method": "vertical-slash", "parameters": {"gamma": 0.3}, "min_query": 32, "tail": 0},
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "not selected": {"sparse": STREAMING},
    "strict": {"latent": True, "sparse": {**STREAMING, "strict": True, "min_query": 4096}},
}
FLOATS = not torch.cuda.is_available()
NEAR = 0.02
"""Between log probabilities: of float32, and of bfloat16, where two kernels round differently."""
ROUGH = 0.5


def stock(job: dict[str, Any]) -> dict[str, Any]:
    """The same without us."""
    return {name: value for name, value in job.items() if name not in ("sparse", "asked", "latent")}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every job by name, and what vLLM says by itself, in one process."""
    folder = tmp_path_factory.mktemp("latent")
    model = str(models.save("deepseek", folder / "deepseek", initializer_range=0.1))
    given = {"model": model, "tokens": 4, "prompt_logprobs": 0, "latent": True}

    def job(asked: dict[str, Any], name: str = "") -> dict[str, Any]:
        usual = {} if FLOATS else {"dtype": "bfloat16"}
        if not FLOATS and name != OWN:
            usual["attention_backend"] = "TRITON_MLA"
        return {**asked, "options": {**usual, **asked.get("options", {})}}

    ours = {name: {**given, **job(one, name)} for name, one in {**JOBS, **SPARSE}.items()}
    jobs = {**ours, **{f"stock: {name}": stock(ours[name]) for name in JOBS}}
    jobs |= {name: {"model": model, "rounds": [MIXED[-1:]], **job(one)} for name, one in OTHERS.items()}
    return dict(zip(jobs, engine.run(list(jobs.values()), folder), strict=True))


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The most by which a log probability of a prompt differs; of prompts that were cached, of what was not."""
    assert "error" not in one, one["error"]
    assert "error" not in other, other["error"]
    pairs = [
        (a, b)
        for mine, theirs in zip(one["rounds"], other["rounds"], strict=True)
        for x, y in zip(mine, theirs, strict=True)
        for a, b in zip(x["prompt"], y["prompt"], strict=True)
    ]
    assert len(pairs) > 1000
    return float(max(abs(a - b) for a, b in pairs))


@pytest.mark.parametrize("name", JOBS)
def test_a_mask_of_every_key_gives_the_hosts_answers(answers: dict[str, Any], name: str) -> None:
    ours, alone = answers[name], answers[f"stock: {name}"]
    exact = FLOATS and name != "bfloat16"
    assert furthest(ours, alone) < (NEAR if exact else ROUGH)
    if exact:
        for turn in range(len(ours["rounds"])):
            assert engine.tokens(alone, turn) == engine.tokens(ours, turn)
    layers = ours["report"]["layers"]
    assert [0, 1, 2] == [layer["layer"] for layer in layers]
    assert all(layer["sparse_calls"] > 0 and layer["dense_calls"] == 0 for layer in layers)
    assert [0] == ours["state"]["requests"], "none is remembered"


@pytest.mark.parametrize("name", SPARSE)
def test_a_method_runs_sparse(answers: dict[str, Any], name: str) -> None:
    ours = answers[name]
    plain = answers["stock: pieces" if "pieces" in name else "stock: whole"]
    assert NEAR < furthest(ours, plain)
    layers = ours["report"]["layers"]
    assert all(layer["dense_calls"] == 0 and 0 < layer["density"] < 1 for layer in layers)


def test_chunks_ran_behind_a_context(answers: dict[str, Any]) -> None:
    for name in ("pieces", "streaming, pieces", "pieces, some dense"):
        layer = answers[name]["report"]["layers"][0]
        assert layer["query_length"] < layer["key_length"], name
        assert len(MIXED) < layer["sparse_calls"]


def test_what_vllm_decodes_is_no_prefill(answers: dict[str, Any]) -> None:
    """On a GPU its own choice decodes up to 512 tokens of a request: `min_query` is raised, and the report says so."""
    notes = answers[OWN]["report"]["notes"]
    raised = [note for note in notes if "tokens of a request as decoding here" in note]
    assert len(raised) == (0 if FLOATS else 1), notes


def test_a_request_asks_for_dense_attention(answers: dict[str, Any]) -> None:
    for name in ("some dense", "pieces, some dense"):
        assert any("the request asks for it (sparseprefill: off)" in note for note in answers[name]["report"]["notes"])


def test_without_it_selected_the_model_is_vllms_own(answers: dict[str, Any]) -> None:
    """``--attention-backend CUSTOM`` is for other attention, and the report names what is for this one."""
    answer, refused = answers["not selected"], answers["strict"]
    if FLOATS:
        (note,) = answer["report"]["notes"]
        assert "nothing can run sparse; for this model it is --attention-config.mla_prefill_backend CUSTOM" in note
    else:  # vLLM refuses it there
        assert "for this model it is --attention-config.mla_prefill_backend CUSTOM" in answer["error"]
    assert "AttachError: strict: " in refused["error"]
    assert "min_query is 4096, but no chunk has more than 2048 tokens" in refused["error"]
