"""The embedded model answers its needles in vLLM as it does with dense attention, at parameters tuned for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sparseprefill.adapters.demo.exam import make_exam, take
from sparseprefill.adapters.demo.model import CHECKPOINT, CLUSTERS, load_tokenizer

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
# Made by an earlier command, by the answers to questions: sample-attention at 2,048 tokens, of alpha_c 0.9 and 0.95
# with alpha_s 0.8 and 0.9.
PROFILE = Path(__file__).with_name("embedded.profile.json")
TOKENS, SEED, QUESTIONS = 2048, 7, 2


def test_needles_are_found_at_a_tuned_profile_that_no_other_model_gets(tmp_path: Path) -> None:
    tokenizer = load_tokenizer()
    exam = make_exam(tokenizer, TOKENS, SEED, QUESTIONS)
    asked = [(one.text, one.answer) for task in exam.tasks for one in task.questions]

    def ids(text: str, **options: Any) -> list[int]:
        found: list[int] = tokenizer(text, **options)["input_ids"]
        return found

    context = ids(exam.context)
    prompts = [context + ids(text, add_special_tokens=False) for text, _ in asked]
    job = {
        "model": str(CHECKPOINT),
        "rounds": [prompts[:1], prompts],  # the text is computed once, and cached for every question
        "tokens": max(len(ids(answer, add_special_tokens=False)) for _, answer in asked),
        "options": {"max_model_len": 4096, "max_num_batched_tokens": 4096, "enable_prefix_caching": True},
    }
    profile = {"method": "sample-attention", "profile": str(PROFILE)}
    shares = {"method": "share-prefill", "parameters": {"clusters": str(CLUSTERS), "delta": 1.01}}
    llama = {"model": str(models.save("llama", tmp_path / "llama")), "rounds": [[[5, 6, 7]]], "sparse": profile}
    jobs: list[dict[str, Any]] = [job, {**job, "sparse": profile}, {**job, "sparse": shares}, llama]
    *answers, other = engine.run(jobs, tmp_path)
    assert "the profile of sample-attention was made for another model" in other["error"]

    def right(answer: dict[str, Any]) -> int:
        said = {text: tokenizer.decode(ids) for (text, _), ids in zip(asked, engine.tokens(answer, 1), strict=True)}
        return sum(found for found, _ in take(exam, lambda question, _: said[question]).values())

    dense, sparse, shared = map(right, answers)
    assert 0 < dense == sparse
    assert dense - 1 <= shared, "the demo's own setting, which is not tuned"
    for answer, most in zip(answers[1:], (0.6, 0.9), strict=True):
        assert all(layer["sparse_calls"] == 1 for layer in answer["report"]["layers"])
        assert answer["report"]["density"] < most
        assert len(answer["report"]["fallbacks"]) == 0
