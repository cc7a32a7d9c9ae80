"""The backend in SGLang's real engine, on a CPU: against SGLang's own attention, and sparse."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..vllm.models import save
from .engine import NEEDED, prompt, running

pytestmark = [NEEDED, pytest.mark.slow]
FULL = {"method": "dense", "gate": False}
"""A mask of every key."""
SPARSE = {
    "method": "streaming",
    "parameters": {"sink": 16, "window": 64},
    "gate": False,
    "tail": 0,
    "recall_every": 1,
    "profiles": {"full": {"method": "dense", "gate": False}},
}
SHORT = [prompt(length) for length in (700, 300, 90)]
SHARED = [SHORT[0][:500] + prompt(200, seed=7)]
"""Finds the first 500 tokens of another in the prefix cache."""
EIGHT = [prompt(150 + 60 * n, seed=3) for n in range(8)]
ASKED = [prompt(600, seed=5)]
TURNS = [{"prompts": SHORT}, {"prompts": SHARED}, {"prompts": EIGHT}, {"prompts": ASKED}]
STOCK = {"prefill_attention_backend": "torch_native"}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("qwen3", {"engine": {**STOCK, "chunked_prefill_size": 256}, "turns": TURNS}),
    "full": (
        "qwen3",
        {"table": FULL, "engine": {"chunked_prefill_size": 160}, "turns": [{"abort": prompt(3500)}, *TURNS]},
    ),
    "pages": (
        "qwen3",
        {
            "table": FULL,
            "engine": {"chunked_prefill_size": 512, "page_size": 64, "enable_mixed_chunk": True},
            "turns": [*TURNS[:2], {"prompts": EIGHT, "params": {"max_new_tokens": 20}, "mixed": True}],
        },
    ),
    "sparse": (
        "qwen3",
        {
            "table": SPARSE,
            "engine": {"chunked_prefill_size": 256},
            "turns": [
                {"prompts": SHORT},
                *({"prompts": ASKED, "asks": [one]} for one in (
                    None, {"sparseprefill": "off"}, {"sparseprefill": "full"}, {"sparseprefill": "off"}, None
                )),
                {"prompts": ASKED, "asks": [{"sparseprefill": "fast"}]},
                {"prompts": ASKED, "asks": [{"sparse_prefill": "off"}]},
            ],
        },
    ),
    "windows": ("gemma3", {"table": FULL, "engine": {"chunked_prefill_size": 256}, "turns": TURNS[:2]}),
    "windows stock": ("gemma3", {"engine": {**STOCK, "chunked_prefill_size": 256}, "turns": TURNS[:2]}),
    "fp8": (
        "qwen3",
        {
            "table": FULL,
            "engine": {"chunked_prefill_size": 256, "kv_cache_dtype": "fp8_e5m2"},
            "turns": TURNS[:2],
        },
    ),
    "fp8 stock": (
        "qwen3",
        {"engine": {**STOCK, "chunked_prefill_size": 256, "kv_cache_dtype": "fp8_e5m2"}, "turns": TURNS[:2]},
    ),
    "two": (
        "qwen3",
        {
            "table": FULL,
            "engine": {"chunked_prefill_size": 256, "tp_size": 2, "disable_overlap_schedule": False},
            "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # else a NUMA node is needed for each
            "turns": TURNS[:2],
        },
    ),
    "wrong layers": ("qwen3", {"table": {"method": "bfla", "layers": [99]}, "turns": []}),
}  # fmt: skip
Ask = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """The answer to a job of `JOBS`; they run two at a time from the first question on."""
    folder = tmp_path_factory.mktemp("engines")
    models = {family: str(save(family, folder / family)) for family in {family for family, _ in JOBS.values()}}
    with running({name: {"model": models[family], **job} for name, (family, job) in JOBS.items()}, folder) as answer:
        yield answer


def turns(ask: Ask, name: str) -> list[Any]:
    answer = ask(name)
    assert "failed" not in answer, answer["failed"][-4000:]
    found: list[Any] = answer["turns"]
    return found


def same(expected: list[Any], actual: list[Any], close: float = 1e-3) -> None:
    """Tokens are equal, and log probabilities close, of what both have."""
    for one, other in zip(expected, actual, strict=True):
        count = min(len(one["tokens"]), len(other["tokens"]))
        assert one["tokens"][:count] == other["tokens"][:count]
        if other["logprobs"]:
            assert one["logprobs"][:count] == pytest.approx(other["logprobs"][:count], abs=close)


@pytest.mark.parametrize("name", ["full", "pages"])
def test_a_mask_of_every_key_is_sglang_s_own_attention(ask: Ask, name: str) -> None:
    """Whatever the chunks and pages, with a prefix from the cache, eight at once, and rows that decode beside them; and
    behind a request that was aborted in the middle of its prompt."""
    stock, ours = turns(ask, "stock"), turns(ask, name)
    if name == "full":
        assert {"ended": "abort", "tokens": [], "in_progress": 0} == ours.pop(0), "and it leaves nothing behind"
    for expected, actual in zip(stock, ours, strict=False):
        same(expected, actual)
    page = 64 if name == "pages" else 1
    assert 500 // page * page == ours[1][0]["cached"]
    (report,) = ask(name)["reports"]
    assert {"sparse"} == {layer["mode"] for layer in report["layers"]}
    assert 0 == report["in_progress"]


def test_sparse_answers_differ_and_the_report_says_why(ask: Ask) -> None:
    stock, ours = turns(ask, "stock")[0], turns(ask, "sparse")[0]
    assert stock[0]["logprobs"] != pytest.approx(ours[0]["logprobs"], abs=1e-2)
    same(stock[2:], ours[2:])  # 90 tokens are too few
    (report,) = ask("sparse")["reports"]
    assert [0, 1, 2] == [layer["layer"] for layer in report["layers"]]
    assert all(0 < layer["density"] < 0.9 for layer in report["layers"])
    assert 0 < report["recall"] < 1
    assert "streaming on Qwen3ForCausalLM (dense: torch_native; grain 1 tokens)" in report["text"]
    assert "streaming for prefill chunks of 128 tokens and more of Qwen3ForCausalLM" in ask("sparse")["log"]


def test_requests_that_ask_for_different_things_share_no_keys(ask: Ask) -> None:
    (stock,) = turns(ask, "stock")[3]
    sparse, off, full, again, hit = (one[0] for one in turns(ask, "sparse")[1:6])
    assert [0, 0, 0] == [one["cached"] for one in (sparse, off, full)]
    assert [599, 599] == [one["cached"] for one in (again, hit)]
    for one in (off, full, again):
        same([stock], [one])
    assert stock["logprobs"] != pytest.approx(sparse["logprobs"], abs=1e-2)
    assert sparse["tokens"] == hit["tokens"]
    (report,) = ask("sparse")["reports"]
    assert 1 <= report["notes"]["the request asks for it (sparseprefill: off)"]
    assert {"full"} == set(report["profiles"])


def test_a_request_for_what_is_not_there_is_refused(ask: Ask) -> None:
    unknown, mistyped = turns(ask, "sparse")[6:]
    assert "sparseprefill is 'fast', which is not a profile of this engine" in unknown["error"]
    assert "did you mean 'sparseprefill'?" in mistyped["error"]


def test_layers_with_a_window_stay_with_sglang(ask: Ask) -> None:
    for expected, actual in zip(turns(ask, "windows stock"), turns(ask, "windows"), strict=True):
        same(expected, actual)
    (report,) = ask("windows")["reports"]
    assert ["dense", "sparse"] * 2 == [layer["mode"] for layer in report["layers"]]
    assert {"the layer has a sliding window"} == {name for one in report["layers"] for name in one["reasons"]}


def test_a_pool_of_fp8_is_read_in_place(ask: Ask) -> None:
    for expected, actual in zip(turns(ask, "fp8 stock"), turns(ask, "fp8"), strict=True):
        same(expected, actual)


def test_two_processes_with_half_of_the_heads_each(ask: Ask) -> None:
    for expected, actual in zip(turns(ask, "stock"), turns(ask, "two"), strict=False):
        same(expected, actual)
    (report,) = ask("two")["reports"]
    assert {"sparse"} == {layer["mode"] for layer in report["layers"]}


def test_a_server_with_wrong_options_does_not_start(ask: Ask) -> None:
    """The model decides of these; of others the unit tests have the words."""
    log = ask("wrong layers")["failed"]
    assert "sparseprefill.layers names 99: Qwen3ForCausalLM has" in log
    assert "Load weight begin" not in log
