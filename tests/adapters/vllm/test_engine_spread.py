"""What else an engine may be asked to do: LoRA, priorities, several answers, drafts, other kinds of models.

Each against vLLM's own attention at a mask of every key, and with a sparse method. All in one process but for a second
n-gram speculator: such a one comes last, since vLLM 0.32 starts no other engine behind it.
"""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
FULL = {"method": "dense", "min_query": 32}
STREAMING = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}, "min_query": 32, "tail": 0}
STEP = 128
LENGTHS = (300, 150, 20)
CHUNKS = 5
"""Of these prompts, in steps of so many tokens; the shortest is below `min_query`."""
MIXED = [models.prompt(length, seed=length) for length in LENGTHS]
PICTURES = [
    {"ids": [*models.prompt(60, seed=1), models.PICTURE, *models.prompt(70, seed=2)], "image": seed} for seed in (1, 2)
]
REPEATED = [models.prompt(40, seed=7) * 4, *MIXED[1:]]
Answers = dict[str, dict[str, dict[str, Any]]]
FEATURES = ("plain", "lora", "priority", "several answers", "draft model", "hybrid", "multimodal", "n-grams")


def jobs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By feature: the engine with vLLM's own attention, at a mask of every key, and with a sparse method."""
    llama = str(models.save("llama", folder / "llama"))
    small = str(models.save("llama", folder / "small", num_hidden_layers=1, num_attention_heads=2))
    plain: dict[str, Any] = {"model": llama, "rounds": [MIXED], "tokens": 6}
    drafts = {"method": "draft_model", "model": small, "num_speculative_tokens": 2}
    words = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": (plain, {}),
        "lora": (
            {**plain, "lora": str(models.save_lora(folder / "lora")), "adapted": [[True, False, True]]},
            # On a CPU vLLM 0.32 gives rows without an adapter the last place among these: it has to be empty.
            {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
        ),
        # The cache is too small for all, so that those that can wait are put off and computed again.
        "priority": (
            {
                **plain,
                "rounds": [[models.prompt(150, seed=n) for n in range(4)]],
                "priorities": [[3, 2, 1, 0]],
                "tokens": 45,
            },
            {"scheduling_policy": "priority", "num_gpu_blocks_override": 17, "max_model_len": 256, "block_size": 32},
        ),
        "several answers": (
            {**plain, "sampling": {"n": 2, "temperature": 1.0}, "logprobs": 2, "prompt_logprobs": 0},
            {"enable_prefix_caching": True},
        ),
        "draft model": (plain, {"speculative_config": drafts}),
        # vLLM has these layers in bfloat16 alone on a CPU.
        "hybrid": (
            {**plain, "model": str(models.save("qwen3.5", folder / "qwen")), "prompt_logprobs": 0},
            {"dtype": "bfloat16"},
        ),
        "multimodal": (
            {**plain, "model": str(models.save_llava(folder / "llava")), "rounds": [[MIXED[1], *PICTURES]]},
            {"skip_tokenizer_init": False},
        ),
        "n-grams": ({**plain, "rounds": [REPEATED]}, {"speculative_config": words}),
    }
    found = {}
    for name, (job, options) in asked.items():
        stock = {**job, "options": {"max_num_batched_tokens": STEP, "max_model_len": 512, **options}}
        drafted = {"speculative_config": {**drafts, "attention_backend": "CUSTOM"}} if name == "draft model" else {}
        found[name] = [
            stock,
            {**stock, "sparse": FULL},
            {**stock, "sparse": STREAMING, "options": {**stock["options"], **drafted}},
        ]
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers by feature, and by `stock`, `full` and `sparse`."""
    folder = tmp_path_factory.mktemp("spread")
    made = jobs(folder)
    assert list(FEATURES) == list(made)
    # Their tokens are held against those of an engine that drafts nothing.
    _, full, sparse = made.pop("n-grams")
    flat = [job for three in made.values() for job in three]
    plain = {**made["plain"][0], "rounds": full["rounds"]}
    seeded = [{**one, "sampling": {"temperature": 1.0, "seed": 1}} for one in made["plain"][:2]]
    *found, own, ours, bare, every_key = engine.run([*flat, *seeded, plain, full], folder, "torchvision")
    (fewer,) = engine.run([sparse], folder)
    kinds = ["stock", "full", "sparse"]
    answers: Answers = {name: dict(zip(kinds, found[3 * n : 3 * n + 3], strict=True)) for n, name in enumerate(made)}
    return {
        **answers,
        "seeds": {"stock": own, "full": ours},
        "n-grams": {"stock": bare, "full": every_key, "sparse": fewer},
    }


def asked(answers: Answers, feature: str) -> dict[str, Any]:
    """The answers of a feature; skips where vLLM's own convolution for CPUs refuses its input, as on some machines."""
    for answer in answers[feature].values():
        if "causal_conv1d_fwd_cpu" in answer.get("error", ""):
            pytest.skip(f"vLLM's operator for hybrid models on this CPU: {answer['error']}")
    return answers[feature]


def said(answer: dict[str, Any]) -> list[list[list[int]]]:
    """All that each prompt was answered."""
    assert "error" not in answer, answer["error"]
    return [one["all"] for one in answer["rounds"][0]]


def moved(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The most by which a log probability of a prompt's token differs; 0 where none was asked for."""
    pairs = zip(one["rounds"][0], other["rounds"][0], strict=True)
    return max((abs(a - b) for x, y in pairs for a, b in zip(x["prompt"], y["prompt"], strict=True)), default=0.0)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_mask_of_every_key_gives_the_hosts_tokens(answers: Answers, feature: str) -> None:
    three = asked(answers, feature)
    stock, full = three["stock"], three["full"]
    assert said(stock) == said(full)
    assert moved(stock, full) < 0.2, "in bfloat16; 0.001 is asked for below"
    assert all(layer["sparse_calls"] > 0 == layer["dense_calls"] for layer in full["report"]["layers"])


@pytest.mark.parametrize("feature", FEATURES)
def test_a_sparse_method_runs_sparse(answers: Answers, feature: str) -> None:
    three = asked(answers, feature)
    stock, sparse = three["stock"], three["sparse"]
    assert said(stock) != said(sparse) or moved(stock, sparse) > 0.2, "few layers of a hybrid model attend to keys"
    report = sparse["report"]
    assert all(layer["sparse_calls"] > 0 == layer["dense_calls"] for layer in report["layers"])
    assert 0 < report["density"] < 1
    assert {0} == set(sparse["state"]["requests"]), "none is remembered when it is over"


@pytest.mark.parametrize("feature", ["plain", "lora", "draft model"])
def test_only_chunks_of_prompts_run_sparse(answers: Answers, feature: str) -> None:
    """Neither rows that decode, nor drafts, nor rows that check them."""
    for kind in ("full", "sparse"):
        layers = asked(answers, feature)[kind]["report"]["layers"]
        assert [CHUNKS] * 3 == [layer["sparse_calls"] for layer in layers]


def test_an_adapter_is_its_requests_alone(answers: Answers) -> None:
    for kind in ("stock", "full", "sparse"):
        plain, adapted = said(answers["plain"][kind]), said(answers["lora"][kind])
        assert [True, False, True] == [a != b for a, b in zip(plain, adapted, strict=True)]


def test_priorities_preempt(answers: Answers) -> None:
    for answer in answers["priority"].values():
        assert 0 < answer["metrics"]["vllm:num_preemptions"]


def test_several_answers_and_their_log_probabilities(answers: Answers) -> None:
    stock, full = answers["several answers"]["stock"], answers["several answers"]["full"]
    for one, other in zip(stock["rounds"][0], full["rounds"][0], strict=True):
        assert 2 == len(one["all"])
        assert one["all"][0] != one["all"][1]
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
        assert len(one["prompt"]) in [length - 1 for length in LENGTHS]
    assert moved(stock, full) < 1e-3


def test_seeds_of_requests(answers: Answers) -> None:
    stock, full = answers["seeds"]["stock"], answers["seeds"]["full"]
    if "error" in stock:
        assert stock["error"] == full["error"]
        pytest.skip(f"vLLM's own attention: {stock['error']}")
    assert said(stock) == said(full)


def test_a_draft_model_stays_dense_and_is_noted(answers: Answers) -> None:
    """Whether its own attention is vLLM's, as it is by default, or this adapter's."""
    assert said(answers["plain"]["stock"]) == said(answers["draft model"]["stock"])
    assert said(answers["plain"]["sparse"]) == said(answers["draft model"]["sparse"])
    for kind in ("full", "sparse"):
        answer = answers["draft model"][kind]
        assert 0 < answer["metrics"]["vllm:spec_decode_num_drafts"]
        assert {"layers of a draft model: what is drafted runs dense": 1} == answer["report"]["notes"]


def test_rows_that_check_n_grams_stay_dense(answers: Answers) -> None:
    for kind in ("full", "sparse"):
        answer = answers["n-grams"][kind]
        assert 0 < answer["metrics"]["vllm:spec_decode_num_drafts"]
        calls = [layer["sparse_calls"] for layer in answer["report"]["layers"]]
        assert [4] * 3 == calls, "chunks of 128, 32, 96 and 54 tokens"


def test_layers_of_linear_attention_are_left_alone(answers: Answers) -> None:
    for kind in ("full", "sparse"):
        report = asked(answers, "hybrid")[kind]["report"]
        assert [1, 3] == [layer["layer"] for layer in report["layers"]]
        assert {"layers of type gdn_attn: they have no keys to choose from": 2} == report["notes"]


def test_an_image_is_seen_and_its_encoder_left_alone(answers: Answers) -> None:
    for kind in ("stock", "full", "sparse"):
        _, one, other = said(answers["multimodal"][kind])
        assert one != other, "the same words with another image"
    report = answers["multimodal"]["sparse"]["report"]
    assert [0, 1, 2] == [layer["layer"] for layer in report["layers"]]
    assert {130 + (models.IMAGE // models.PATCH) ** 2} == {layer["key_length"] for layer in report["layers"]}
