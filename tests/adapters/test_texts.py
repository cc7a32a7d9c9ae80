"""Natural texts with passages and facts that are restated far below."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.adapters.evaluation.prompts import Prompt, Span
from sparseprefill.adapters.evaluation.texts import (
    COPIES,
    CUE,
    END,
    FACTS,
    FAR,
    KINDS,
    LENGTH,
    SHORTEST,
    built_in,
    share_of,
    uncollected,
    with_copies,
)

from sparseprefill.errors import ParameterError

COUNT = len(KINDS)


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_left_as_it_was(before: bool) -> None:
    on = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
        assert before == gc.isenabled()
        with pytest.raises(ZeroDivisionError), uncollected():
            raise ZeroDivisionError
        assert before == gc.isenabled()
    finally:
        (gc.enable if on else gc.disable)()


@pytest.fixture(scope="module")
def prompts(embedded_tokenizer: Any) -> list[Prompt]:
    return built_in(embedded_tokenizer, 8192, 2 * COUNT, seed=1)


def first_of(prompt: Prompt, span: Span) -> int:
    """Where the tokens that a restated passage begins with stand first."""
    start = span.first - CUE
    passage = prompt.ids[start : span.last]
    return next(at for at in range(start + 1) if prompt.ids[at : at + LENGTH] == passage)


def test_kinds_take_turns_and_each_text_is_another(prompts: list[Prompt]) -> None:
    assert [f"{kind} {place}" for place in (1, 2) for kind in KINDS] == [one.name for one in prompts]
    assert len(prompts) == len({one.ids for one in prompts})
    assert {8192} == {len(one.ids) for one in prompts}


def test_passages_stand_far_above_word_for_word(prompts: list[Prompt]) -> None:
    far = 0
    for prompt in prompts:
        assert len(prompt.copies) == COPIES
        for span in prompt.copies:
            assert span.last - span.first == LENGTH - CUE
            assert span.last <= 8192 - END
            far += span.first - CUE - first_of(prompt, span) >= FAR + LENGTH
    assert far >= 0.95 * COPIES * len(prompts), "but for passages that the text itself has again"


def test_facts_stand_twice_and_their_values_are_the_answers(prompts: list[Prompt], embedded_tokenizer: Any) -> None:
    for prompt in prompts:
        assert len(prompt.inside) == FACTS
        whole = embedded_tokenizer.decode(prompt.ids)
        for span in prompt.inside:
            value = embedded_tokenizer.decode(prompt.ids[span.first : span.last]).strip()
            assert value.isdigit()
            assert len(value) == 7
            assert whole.count(value) == 2


def test_the_same_seed_gives_the_same_texts(prompts: list[Prompt], embedded_tokenizer: Any) -> None:
    assert prompts[COUNT:] == built_in(embedded_tokenizer, 8192, COUNT, seed=2)
    assert prompts[0] == built_in(embedded_tokenizer, 8192, 1, seed=1, kinds=["code"])[0]


def test_short_texts_have_fewer_and_the_shortest_none(embedded_tokenizer: Any) -> None:
    counts = [len(built_in(embedded_tokenizer, tokens, 1)[0].copies) for tokens in (SHORTEST - 1, SHORTEST, 4096)]
    assert counts == [0, share_of(COPIES, SHORTEST), share_of(COPIES, 4096)]
    assert 0 < counts[1] < counts[2] < COPIES


def test_a_kind_that_there_is_not_is_refused(embedded_tokenizer: Any) -> None:
    with pytest.raises(ParameterError, match="kinds holds 'poems': pass some of code, docs, notes, records"):
        built_in(embedded_tokenizer, 4096, 1, kinds=["poems"])


@given(st.integers(1, 20_000), st.integers(0, 500), st.booleans())
def test_a_prompt_of_one_s_own_keeps_its_words_its_answers_and_its_end(tokens: int, seed: int, roomy: bool) -> None:
    """Every token is another number, so that what was put in shows."""
    answers = tuple(Span("a", at, at + 7) for at in range(1, max(1, tokens - 2 * END), 97))
    prompt = Prompt("mine", tuple(range(tokens)), answers)
    found = with_copies(prompt, None if roomy else tokens, seed)
    added = sum(one.last - one.first + CUE for one in found.copies)
    assert len(found.copies) == (0 if found == prompt else share_of(COPIES, tokens))
    assert len(found.ids) == tokens + (added if roomy else 0)
    assert found.ids[-END:] == prompt.ids[-END:]
    put = {at for one in found.copies for at in range(one.first - CUE, one.last)}
    rest = [token for at, token in enumerate(found.ids) if at not in put]
    assert all(one < other for one, other in pairwise(rest)), "the text itself, in its order"
    for span in found.inside:
        tokens_of = found.ids[span.first : span.last]
        assert tokens_of == tuple(range(tokens_of[0], tokens_of[0] + 7)), "no answer is cut"
        assert (tokens_of[0] - 1) % 97 == 0
    assert len(found.inside) == len(answers) or not roomy
    for span in found.copies:
        passage = found.ids[span.first - CUE : span.last]
        assert passage == tuple(range(passage[0], passage[0] + LENGTH))
        first = found.ids.index(passage[0])
        assert found.ids[first : first + LENGTH] == passage, "the passage itself is whole"
        assert span.first - CUE - first >= FAR
