"""The last layer without the rows that nobody reads (`skip_unread`), in the engine."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
from sparseprefill.adapters.session.session import UNREAD

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
LONG = [models.prompt(length, seed=length) for length in (900, 513, 384, 20)]
TABLE = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}, "min_query": 64}
LAST = 2
NOTE = UNREAD.format(layer=LAST)
CASES: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"options": {"max_num_batched_tokens": 256}},
    "prefix cache": {"rounds": [LONG, LONG], "options": {"enable_prefix_caching": True, "max_num_batched_tokens": 512}},
    "asked of each prompt": {"prompt_logprobs": 1},
}
HYBRID = "a hybrid model"
"""Two of its four layers have linear attention, the last has full attention. vLLM has these in bfloat16 alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("unread")


@pytest.fixture(scope="module")
def answers(folder: Any) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Each case with all rows and without the unread ones, all in one process; and what is refused."""
    model = str(models.save("llama", folder / "llama"))
    jobs: list[dict[str, Any]] = []
    for case in CASES.values():
        job = {"model": model, "rounds": [LONG], "tokens": 4, "logprobs": 1, **case}
        jobs += [{**job, "sparse": {**TABLE, "skip_unread": skip}} for skip in (False, True)]
    other = {"model": str(models.save("qwen3.5", folder / "qwen")), "options": {"dtype": "bfloat16"}}
    job = {"rounds": [LONG[:1]], "tokens": 4, "logprobs": 1, **other}
    jobs += [{**job, "sparse": {**TABLE, "skip_unread": skip}} for skip in (False, True)]
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    alone = {"model": model, "rounds": [LONG[-1:]], "tokens": 1}
    jobs += [
        {**alone, "sparse": {**TABLE, "skip_unread": True}, "options": {"speculative_config": drafts}},
        {**alone, "sparse": {**TABLE, "skip_unread": True, "layers": [0, 1]}},
    ]
    found = engine.run(jobs, folder, "torchvision")
    return dict(zip((*CASES, HYBRID, "refused"), zip(found[::2], found[1::2], strict=True), strict=True))


def skipped(answer: dict[str, Any]) -> int:
    count: int = answer["report"]["notes"].get(NOTE, 0)
    return count


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_as_with_all_rows(answers: dict[str, Any], case: str) -> None:
    """Sums over keys have another order here; `test_engine_interpreter` compares bits."""
    whole, part = answers[case]
    assert "error" not in part, part["error"]
    for turn, rounds in enumerate(whole["rounds"]):
        assert engine.tokens(whole, turn) == engine.tokens(part, turn)
        for one, other in zip(rounds, part["rounds"][turn], strict=True):
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-5)
            assert one["prompt"] == other["prompt"]
    assert 0 == skipped(whole)


@pytest.mark.parametrize(("case", "calls"), [("whole prompts", 3), ("chunks", 6), ("prefix cache", 4)])
def test_the_last_layer_computes_less(answers: dict[str, Any], case: str, calls: int) -> None:
    whole, part = answers[case]
    assert calls <= skipped(part)
    if case == "whole prompts":
        first, *_, last = part["report"]["layers"]
        assert last["density"] < first["density"]
    assert [one["sparse_calls"] for one in whole["report"]["layers"]] == [
        one["sparse_calls"] for one in part["report"]["layers"]
    ]


def test_a_hybrid_model_whose_last_layer_has_full_attention(answers: dict[str, Any]) -> None:
    whole, part = answers[HYBRID]
    if "causal_conv1d_fwd_cpu" in part.get("error", ""):
        pytest.skip(f"vLLM's operator for hybrid models on this CPU: {part['error']}")
    assert engine.tokens(whole) == engine.tokens(part)
    (one,), (other,) = whole["rounds"][0], part["rounds"][0]
    assert one["logprobs"] == pytest.approx(other["logprobs"], abs=0.02)
    assert 0 < part["report"]["notes"].get(UNREAD.format(layer=3), 0)


def test_log_probabilities_of_a_prompt_are_of_all_its_rows(answers: dict[str, Any]) -> None:
    whole, part = answers["asked of each prompt"]
    assert [length - 1 for length in (900, 513, 384, 20)] == [len(one["prompt"]) for one in part["rounds"][0]]
    assert 0 == skipped(part)
    assert whole["report"]["layers"][LAST]["density"] == part["report"]["layers"][LAST]["density"]


def test_what_reads_all_rows_is_refused(answers: dict[str, Any]) -> None:
    drafts, layers = answers["refused"]
    assert "skip_unread is true, but drafts are made from all rows" in drafts["error"]
    assert "skip_unread is true, but layer 2, the model's last, cannot run sparse here" in layers["error"]
