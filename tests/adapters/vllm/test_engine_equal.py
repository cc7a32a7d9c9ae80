"""With a mask of every key the engine says what it says with its own backend, token for token."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
Answers = dict[str, tuple[dict[str, Any], dict[str, Any]]]
MIXED = [models.prompt(length, seed=length) for length in (900, 500, 260, 20)]
SHARED = [models.prompt(length, seed=length, shared=300) for length in (700, 500, 420)]
EIGHT = [models.prompt(length, seed=length) for length in (500, 130, 310, 7, 129, 128, 260, 64)]

# name: (prompts by round, options of the engine)
CASES: dict[str, tuple[list[list[list[int]]], dict[str, Any]]] = {
    "mixed lengths": ([MIXED], {}),
    "chunks": ([MIXED], {"max_num_batched_tokens": 256}),
    "prefix cache": ([SHARED, SHARED], {"enable_prefix_caching": True, "max_num_batched_tokens": 512}),
    "preemption": (
        [[models.prompt(150, seed=n) for n in range(4)]],
        {"num_gpu_blocks_override": 17, "max_model_len": 256, "block_size": 32},
    ),
    "batch of eight": ([EIGHT], {}),
    "small blocks": ([MIXED], {"block_size": 32}),
    "bfloat16": ([MIXED], {"dtype": "bfloat16"}),
    "fp8 cache": ([MIXED], {"kv_cache_dtype": "fp8"}),
}


TIE = 0.1
"""Between the log probabilities of two tokens."""
FAMILIES = {"qwen3": 0, "gemma3": 2}
"""How many of their layers have a sliding window."""
FOUR_BITS = ("gptq", "awq")
"""Formats of weights."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Each case by the stock backend and by ours, all in one process."""
    folder = tmp_path_factory.mktemp("equal")
    model = str(models.save("llama", folder / "llama"))
    jobs: list[dict[str, Any]] = []
    for rounds, options in CASES.values():
        outgrown = "num_gpu_blocks_override" in options  # the cache, while the requests decode
        job = {"model": model, "rounds": rounds, "options": options, "tokens": 45 if outgrown else 8}
        job |= {"logprobs": 2} if "dtype" in options else {}
        jobs += [job, {**job, "sparse": {"method": "dense", "min_query": 32}}]
    for family in FAMILIES:
        other = str(models.save(family, folder / family))
        job = {"model": other, "rounds": [MIXED], "options": {"max_num_batched_tokens": 512}}
        jobs += [job, {**job, "sparse": {"method": "dense"}}]
    for kind in FOUR_BITS:
        other = str(models.save_in_4_bits(kind, folder / kind))
        job = {"model": other, "rounds": [MIXED], "options": {"dtype": "bfloat16"}, "tokens": 8, "logprobs": 2}
        jobs += [job, {**job, "sparse": {"method": "dense", "min_query": 32}}]
    found = engine.run(jobs, folder)
    return dict(zip((*CASES, *FAMILIES, *FOUR_BITS), zip(found[::2], found[1::2], strict=True), strict=True))


ABSENT = ("FP8 KV cache on CPU requires", "Failed to find a kernel that can implement", "'cpu_gemm_wna16'")
"""What vLLM says by itself where it lacks a kernel for this processor; the last one is of its 4-bit weights."""


def possible(answer: dict[str, Any]) -> None:
    """Skip what vLLM itself cannot do on this processor."""
    error = answer.get("error", "")
    if any(words in error for words in ABSENT):
        pytest.skip(error)


def differ(stock: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether tokens differ, but in bfloat16 behind a tie of the host's two best: two kernels round differently."""
    places = (i for i, (a, b) in enumerate(zip(stock["tokens"], ours["tokens"], strict=True)) if a != b)
    first = next(places, None)
    return first is not None and not (stock["margins"] and stock["margins"][first] < TIE)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_equal(answers: Answers, case: str) -> None:
    stock, ours = answers[case]
    possible(stock)
    for turn in range(len(CASES[case][0])):
        assert len(engine.tokens(stock, turn)) == len(engine.tokens(ours, turn))
        pairs = zip(stock["rounds"][turn], ours["rounds"][turn], strict=True)
        assert not any(differ(one, other) for one, other in pairs)
    layers = ours["report"]["layers"]
    assert [0, 1, 2] == [layer["layer"] for layer in layers]
    assert all(layer["sparse_calls"] > 0 and layer["dense_calls"] == 0 for layer in layers)


def test_chunks_and_hits_ran_sparse_behind_a_context(answers: Answers) -> None:
    for case, calls in (("chunks", 4), ("prefix cache", 4)):
        layer = answers[case][1]["report"]["layers"][0]
        assert calls < layer["sparse_calls"]
        assert layer["query_length"] < layer["key_length"]


def test_a_request_was_preempted(answers: Answers) -> None:
    for answer in answers["preemption"]:
        assert 0 < answer["metrics"]["vllm:num_preemptions"]


def test_no_request_is_remembered_when_it_is_over(answers: Answers) -> None:
    ran = [ours for stock, ours in answers.values() if "error" not in stock]
    assert len(ran) >= len(answers) - 1 - len(FOUR_BITS)
    for ours in ran:
        assert {0} == set(ours["state"]["requests"])


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(answers: Answers, family: str) -> None:
    stock, ours = answers[family]
    assert engine.tokens(stock) == engine.tokens(ours)
    layers = ours["report"]["layers"]
    stayed = [layer for layer in layers if layer["mode"] == "dense"]
    assert FAMILIES[family] == len(stayed)
    assert all({"the layer has a sliding window": layer["dense_calls"]} == layer["reasons"] for layer in stayed)
    assert all(layer["mode"] == "sparse" for layer in layers if layer not in stayed)


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_weights_in_4_bits(answers: Answers, kind: str) -> None:
    stock, ours = answers[kind]
    for one in FOUR_BITS:  # behind an engine that failed, the next may not start in that process
        possible(answers[one][0])
    pairs = zip(stock["rounds"][0], ours["rounds"][0], strict=True)
    assert not any(differ(one, other) for one, other in pairs)
    assert engine.tokens(stock) != engine.tokens(answers["mixed lengths"][0])  # the weights are rounded
    assert all(layer["sparse_calls"] > 0 and layer["dense_calls"] == 0 for layer in ours["report"]["layers"])
