"""Answers inside a prompt: what is made, where it stands, and that neither a window nor the tail finds it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.demo.exam import Exam, asker, make_exam, prompt_of
from sparseprefill.adapters.demo.inside import FAMILIES, MOST, WINDOW
from sparseprefill.adapters.demo.model import load_model, load_tokenizer
from sparseprefill.adapters.evaluation.comparison import Comparison
from sparseprefill.adapters.evaluation.outcome import Contender, Copies, Outcome
from sparseprefill.adapters.evaluation.prompts import Prompt, Span, spans_of
from sparseprefill.adapters.evaluation.reading import APART, Sizes, copied, inside_rows, right_inside

import sparseprefill as sp
from helpers.examples import few_of
from sparseprefill.errors import ParameterError

MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture(scope="module")
def tokenizer(embedded_tokenizer: Any) -> Any:
    return embedded_tokenizer


def made(tokenizer: Any, tokens: int, seed: int = 0) -> tuple[Exam, Prompt]:
    exam = make_exam(tokenizer, tokens, seed, 2)
    return exam, prompt_of(exam, tokenizer)[0]


@pytest.mark.parametrize("tokens", [4096, 8192, 16384])
def test_every_family_has_as_many_answers_and_each_is_a_number_of_the_text(tokenizer: Any, tokens: int) -> None:
    exam, prompt = made(tokenizer, tokens)
    families = Counter(one.family for one in prompt.inside)
    assert set(families) == set(FAMILIES)
    assert set(families.values()) == {MOST if tokens >= 8192 else 4}
    for one, (_, first, last) in zip(prompt.inside, exam.inside, strict=True):
        text = exam.context[first:last]
        assert text.isdigit()
        assert tokenizer.decode(prompt.ids[one.first : one.last]).strip() == text
        assert exam.context.index(text) < first - 288, "the fact stands before it"
    assert len(prompt.ids) <= tokens


def test_most_answers_are_far_from_their_fact_and_some_are_near(tokenizer: Any) -> None:
    far, every = 0, 0
    for seed in range(6):
        exam, _ = made(tokenizer, 16384, seed)
        offsets = tokenizer(exam.context, return_offsets_mapping=True)["offset_mapping"]
        at = {begin: index for index, (begin, _) in enumerate(offsets)}
        for _, first, last in exam.inside:
            # The last place before it where the number stands: what a window would have to reach.
            before = exam.context.rindex(exam.context[first:last], 0, first)
            starts = [at.get(c, at.get(c - 1)) for c in (before, first)]
            distance = (starts[1] or 0) - (starts[0] or 0)
            assert distance >= 256
            far += distance > WINDOW
            every += 1
    assert 0.85 <= far / every < 1.0


def test_no_answer_stands_among_the_last_rows(tokenizer: Any) -> None:
    for seed in range(4):
        exam, prompt = made(tokenizer, 4096, seed)
        context = len(tokenizer(exam.context)["input_ids"])
        assert max(one.last for one in prompt.inside) < context - APART


def test_the_same_seed_makes_the_same_text_and_wordings_vary(tokenizer: Any) -> None:
    assert made(tokenizer, 8192) == made(tokenizer, 8192)
    exam, _ = made(tokenizer, 8192)
    lines = [exam.context[:first].rsplit("\n", 1)[-1] for _, first, _ in exam.inside]
    assert len({line.split()[0] for line in lines}) >= 4


def test_the_end_asks_for_the_last_of_each_chain(tokenizer: Any) -> None:
    exam, _ = made(tokenizer, 8192)
    task = next(one for one in exam.tasks if one.family == "linked")
    for question in task.questions:
        key = question.text.split(" for ")[1].split("?")[0]
        line = next(line for line in exam.context.splitlines() if f"for {key} and" in line or f"for {key} is" in line)
        assert line.endswith(f"The special magic number for {key} is {question.values[0]}.")


def test_a_short_exam_has_none(tokenizer: Any) -> None:
    exam, prompt = made(tokenizer, 2048)
    assert (exam.inside, prompt.inside) == ((), ())


class Words:
    """A tokenizer whose tokens are words, with what stands at their ends."""

    is_fast = True

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        spans, begin = [], 0
        for word in text.split(" "):
            spans.append((begin, begin + len(word)))
            begin += len(word) + 1
        return {"input_ids": list(range(len(spans))), "offset_mapping": spans}


def test_a_token_that_holds_an_answer_and_more_is_refused() -> None:
    assert spans_of("a is 12 .", [("f", 5, 7)], Words())[1] == (Span("f", 2, 3),)
    with pytest.raises(ParameterError, match=r"joins the answer '12' with other text into '12\.'.*splits numbers"):
        spans_of("a is 12.", [("f", 5, 7)], Words())
    with pytest.raises(ParameterError, match="tokenizer is object, which does not say where its tokens stand"):
        spans_of("a is 12.", [("f", 5, 7)], object())


class Given:
    """Rows of a prefill whose logits are known."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.logits[rows]


def test_rows_inside_are_all_but_those_that_the_tail_serves() -> None:
    assert inside_rows(900) == 900 - APART
    assert inside_rows(100) == 100, "a prompt that has no more is all inside"


def test_an_answer_counts_if_each_of_its_tokens_is_the_likeliest() -> None:
    prompt = Prompt("p", (1, 2, 3, 4, 5, 6), (Span("a", 1, 3), Span("a", 4, 5), Span("b", 5, 6)))
    logits = torch.eye(8)[[2, 0, 0, 5, 6, 0]]  # the row before a token says it
    assert right_inside(prompt, Given(logits)) == {"a": (1, 2), "b": (1, 1)}  # type: ignore[arg-type]
    assert right_inside(prompt, Given(logits[:5])) == {"a": (1, 2)}  # type: ignore[arg-type]
    assert right_inside(Prompt("p", (1, 2)), Given(logits[:2])) == {}  # type: ignore[arg-type]


def test_each_restated_token_counts_beside_dense_s() -> None:
    prompt = Prompt("p", (1, 2, 3, 4, 5, 6), copies=(Span("copies", 1, 3), Span("copies", 4, 6)))
    logits = torch.eye(8)[[2, 0, 0, 5, 6, 0]].log()
    dense = copied(prompt, Given(logits))  # type: ignore[arg-type]
    assert dense == Copies(3, 4, math.inf, 3)
    assert copied(prompt, Given(logits[:3]), dense) == Copies(1, 2, math.inf, 3)  # type: ignore[arg-type]
    assert copied(Prompt("p", (1, 2)), Given(logits)) is None  # type: ignore[arg-type]
    telling = [one.telling for one in (Copies(3, 4, 0.0, 3), Copies(1, 4, 0.0, 1), Copies())]
    assert telling == [True, False, False]


def outcomes_of(model: Any, tokenizer: Any, tokens: int, *contenders: Contender) -> list[Outcome]:
    exam, (prompt, behind) = (one := make_exam(tokenizer, tokens, 7, 1)), prompt_of(one, tokenizer)
    sizes = Sizes(tail=behind, greedy=1, last=1, rows=4)
    comparison = Comparison.of(model, prompt, sizes, ask=asker(model, tokenizer, exam))
    return [comparison.stock, *map(comparison.run, contenders)]


@pytest.mark.parametrize("folder", [None, *few_of(["long0", "long1"], ())])
def test_a_window_finds_a_fifth_at_most_and_the_tail_does_not_help(tokenizer: Any, folder: str | None) -> None:
    """A test that streaming passes cannot show that a method keeps anything."""
    where = None if folder is None else MODELS / folder
    model = load_model(dtype=torch.float32, folder=where)
    own = tokenizer if where is None else load_tokenizer(where)
    streaming = sp.build("streaming", sink=128, window=WINDOW)
    contenders = [Contender("tail", streaming, dense_tail=128)]
    contenders += [Contender("bare", streaming, dense_tail=0)] if where is None else []
    stock, tail, *bare = outcomes_of(model, own, 4096, *contenders)
    right, asked = stock.inside_score
    assert asked == 16
    assert right >= 0.95 * asked
    assert tail.inside_score[0] <= 0.2 * right
    assert all(one.inside_score == tail.inside_score for one in bare), "without a tail, of the embedded model"
    assert stock.score[0] >= 0.95 * stock.score[1]
    assert tail.score[0] >= 0.8 * stock.score[0], "the end says nothing of it"
    assert tail.fidelity is not None
    assert tail.fidelity.inside.kl > 10 * tail.fidelity.end.kl
    assert tail.fidelity.inside.rows == inside_rows(tail.tokens)


def test_what_runs_dense_loses_nothing_inside(tokenizer: Any) -> None:
    model = load_model(dtype=torch.float32)
    stock, full = outcomes_of(model, tokenizer, 4096, Contender("all", sp.build("streaming", window=8192)))
    assert (full.inside, full.score) == (stock.inside, stock.score)
    assert full.fidelity is not None
    assert full.fidelity.inside.agreement >= 0.998
    assert full.fidelity.inside.worst < 1e-3
    assert abs(full.fidelity.inside.nll_ratio - 1) < 1e-3
