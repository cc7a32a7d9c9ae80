"""Over 1 to 4 processes: the logits and greedy tokens of the method `star-attention` on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import jobs, world
from distributed.models import FAMILIES, QUESTIONS, alone, build, lines, tokens

CLOSE = 1e-4


def made(job: str, *arguments: Any) -> list[Any]:
    """What each of four processes returned."""
    outcomes = world.shared(jobs.RANKS).run(getattr(jobs, job), *arguments)
    assert [outcome.error for outcome in outcomes] == [""] * jobs.RANKS
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_equals_one_device(family: str) -> None:
    model, answers = build(family), made("equal", family)
    for case, sizes in jobs.cases(family):
        turns = alone(model, case.context, QUESTIONS, **case.parameters)
        for size in sizes:
            ranks = [answers[rank][size, case.name] for rank in range(size)]
            for found in ranks:
                for (logits, answer), ours, theirs in zip(turns, found["logits"], found["answers"], strict=True):
                    assert float((ours - logits).abs().max()) <= CLOSE, (case.name, size)
                    assert theirs == answer, (case.name, size)
            held = [found["held"][0] for found in ranks]
            assert sum(held) == case.length // case.parameters["tile"] * case.parameters["tile"]


@pytest.mark.parametrize(
    ("family", "without"), [("Gemma2", {"attn_logit_softcapping": None}), ("Gemma2", {"query_pre_attn_scalar": 8})]
)
def test_softcap_and_scale_matter_to_the_models_that_have_them(family: str, without: dict[str, Any]) -> None:
    """Else the test above would not notice a part of Star that drops them."""
    ids = torch.tensor([tokens(200)])
    with torch.no_grad():
        apart = build(family)(ids).logits - build(family, **without)(ids).logits
    assert float(apart.abs().max()) > 1000 * CLOSE


def test_sinks_matter_to_the_model_that_has_them() -> None:
    model, ids = build("GptOss"), torch.tensor([tokens(200)])
    with torch.no_grad():
        before = model(ids).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        assert float((model(ids).logits - before).abs().max()) > 1000 * CLOSE


def test_rows_of_a_batch_equal_each_alone() -> None:
    model, answers = build(), made("batch")
    for row, context in enumerate(jobs.ROWS):
        turns = alone(model, context, tuple(asked[row] for asked in jobs.ASKED), **jobs.BATCH)
        for size in jobs.SOME:
            found = answers[size - 1][size]
            for turn, (_, answer) in enumerate(turns):
                assert found["answers"][turn][row] == answer == found["again"][turn][row], (row, size, turn)
            count = len(jobs.ASKED[0][row])
            assert float((found["logits"][row, -count:] - turns[0][0]).abs().max()) <= CLOSE


def test_sampling_draws_the_same_on_every_rank() -> None:
    answers = made("sampled")
    first = answers[0][1]["drawn"]
    assert first[0] == first[1] != first[2]
    for size in jobs.SOME:
        for rank in range(size):
            assert answers[rank][size] == {"drawn": first, "kept": True}


def test_a_row_that_ends_early_goes_on_where_it_ended() -> None:
    model = build()
    whole = [
        alone(model, row, (asked,), **jobs.BATCH)[0][1] for row, asked in zip(jobs.ROWS, jobs.ASKED[0], strict=True)
    ]
    end = whole[1][1]  # the second token of row 1's answer
    first, second = made("ends", end)[0]

    def until(row: list[int]) -> list[int]:
        return row[: row.index(end) + 1] if end in row else row

    assert first == [until(row) for row in whole]
    assert len(first[1]) < len(whole[1])
    context = jobs.ROWS[1] + jobs.ASKED[0][1] + first[1]
    (_, answer) = alone(model, context, (jobs.ASKED[1][1],), **{**jobs.BATCH, "context_length": len(jobs.ROWS[1])})[0]
    assert second[1] == until(answer)


def test_rows_merged_by_shares_equal_one_device() -> None:
    ((logits, _),) = alone(build(), tokens(200), QUESTIONS[:1], **jobs.BATCH)
    for ours in made("swapped"):
        assert float((ours - logits).abs().max()) <= CLOSE


def test_bytes_per_token_are_those_stated() -> None:
    layers, count, heads, kv_heads, width = 2, 40, 4, 2, 8
    for rank, sent in enumerate(made("volume", count)):
        assert sent["tokens"] == count_with_rest(count) * layers * heads * 4 * (width + 1)
        assert sent["anchor"] == (48 * layers * kv_heads * 2 * width * 4 if rank == 0 else 0)


def count_with_rest(count: int) -> int:
    """Of 200 tokens of context 8 stand behind the last whole tile, and are read with the first question."""
    return count + 200 % 16


@pytest.mark.parametrize(
    ("inside", "tied"), [({}, False), ({"inner": "streaming"}, True)], ids=["dense", "streaming, tied embeddings"]
)
def test_weights_shared_by_two_ranks(inside: dict[str, Any], tied: bool) -> None:
    parameters: dict[str, Any] = {"block_size": 32, "tile": 16, **inside}
    ((logits, answer),) = alone(build(tie_word_embeddings=tied), tokens(200), QUESTIONS[:1], **parameters)
    outcomes = world.shared(4).run(jobs.tensor, parameters, tied)
    assert [outcome.error for outcome in outcomes] == [""] * 4
    for outcome in outcomes:
        assert outcome.value["heads"] == 1
        assert outcome.value["answer"] == answer
        assert float((outcome.value["logits"] - logits).abs().max()) <= CLOSE


def test_the_embedded_model_answers_over_any_number_of_ranks() -> None:
    from sparseprefill.adapters.demo.model import load_model, load_tokenizer
    from sparseprefill.adapters.demo.tasks import make_task
    from sparseprefill.adapters.huggingface import attach

    tokenizer = load_tokenizer()
    task = make_task(tokenizer, "multikey", 700, 5, questions=2, distractors=2, lines=lines())
    context = tokenizer(task.context)["input_ids"]
    asked = [tokenizer(question.text, add_special_tokens=False)["input_ids"] for question in task.questions]
    new = max(len(tokenizer(q.answer, add_special_tokens=False)["input_ids"]) for q in task.questions)
    model, answers = load_model(torch.float32), made("embedded", tuple(context), tuple(map(tuple, asked)), new)
    for number, question in enumerate(asked):
        ids = torch.tensor([context + question])
        options: dict[str, Any] = {"block_size": 128, "context_length": len(context)}
        with torch.no_grad(), attach(model, "star-attention", tail=0, verify=False, gate=None, **options):
            logits = model(ids, logits_to_keep=len(question)).logits[0]
            answer = model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()
        assert set(task.questions[number].values) <= set(tokenizer.decode(answer).replace(".", " ").split())
        for size in jobs.ALL:
            ours, found = answers[size - 1][size][number]
            assert float((ours - logits).abs().max()) <= CLOSE
            assert found == answer[: len(found)]
            assert len(found) >= len(answer) - 1
