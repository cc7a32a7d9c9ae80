"""A prompt behind a cache that was filled before goes on as its rows were computed, as far as forwards told."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.rows import UNSEEN, Rows, forget, rows_of, write
from transformers import DynamicCache

import sparseprefill as sp
from helpers import hf_models
from sparseprefill.breakeven.before import Before
from sparseprefill.breakeven.table import Verdict

SIZES: dict[str, Any] = {"sink": 4, "window": 16, "block": 8}


class Gate:
    """Finds prompts of 90 tokens and more worth it."""

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        return Verdict(call.kv_len >= 90, reason="" if call.kv_len >= 90 else "too short")


def attached(model: Any) -> Any:
    return attach(model, "streaming", **SIZES, gate=Gate(), min_query=8)


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return hf_models.prompt(length, seed=seed)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda cache: cache], ids=["deep", "shallow", "itself"])
@torch.no_grad()
def test_behind_the_beginning_of_a_sparse_prompt_a_short_one_goes_on_sparse(copied: Callable[[Any], Any]) -> None:
    model = hf_models.build("llama")
    with attached(model) as handle:
        cache = model(ids(96)).past_key_values
        again = copied(cache)
        again.crop(-(96 - 40))
        model(ids(30, seed=1), past_key_values=again)
        report = handle.report()
    assert {"sparse": 1, "sparse behind sparse": 1} == report.prompts
    assert {"sparse": 40} == report.cached
    assert "behind cached tokens (40 computed sparse by streaming) the prompt goes on sparse" in report.notes
    assert {} == report.fallbacks
    assert "cached tokens before them: 40 sparse" in str(report)


@torch.no_grad()
def test_a_conversation_that_began_dense_stays_so() -> None:
    model = hf_models.build("llama")
    with attached(model) as handle:
        out = model.generate(ids(40), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        turn = torch.cat([out.sequences, ids(60, seed=1)], -1)
        model.generate(turn, past_key_values=out.past_key_values, max_new_tokens=1, do_sample=False)
        report = handle.report()
    assert {"dense": 1, "dense behind dense": 1} == report.prompts
    assert {"dense": 43} == report.cached  # the last token of an answer is not computed with it
    assert "behind cached tokens (43 computed dense) the prompt goes on dense" in report.fallbacks


@torch.no_grad()
def test_an_answer_behind_a_sparse_prompt_is_dense() -> None:
    model = hf_models.build("llama")
    with attached(model) as handle:
        out = model.generate(ids(96), max_new_tokens=11, do_sample=False, return_dict_in_generate=True)
        turn = torch.cat([out.sequences, ids(9, seed=1)], -1)
        model.generate(turn, past_key_values=out.past_key_values, max_new_tokens=1, do_sample=False)
        report = handle.report()
    assert {"sparse": 96, "dense": 10} == report.cached
    assert {"sparse": 1, "sparse behind sparse": 1} == report.prompts


@torch.no_grad()
def test_what_was_computed_without_the_method_is_dense_or_unknown() -> None:
    model = hf_models.build("llama")
    early = model(ids(50)).past_key_values
    with attached(model) as handle:
        late = DynamicCache(config=model.config)
        with handle.decoding():
            model(ids(50), past_key_values=late)
        for cache in (early, late):
            model(ids(30, seed=1), past_key_values=cache)
        reasons = list(handle.report().fallbacks)
    guess = "too short (judged for the 50 tokens before it: dense, as a prompt of 50 tokens would have been"
    assert [
        f"{guess}; 50 nobody knows how: {UNSEEN})",
        "behind cached tokens (50 computed dense) the prompt goes on dense",
    ] == reasons


@torch.no_grad()
def test_a_forward_that_fails_leaves_rows_of_which_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_models.build("llama")
    with attached(model):
        cache = model(ids(96)).past_key_values
        last = model.model.layers[-1].mlp
        monkeypatch.setattr(last, "forward", lambda x: x.nothing)
        with pytest.raises(AttributeError):
            model(ids(20, seed=1), past_key_values=cache)
    assert Before(sparse=96, unknown=20, methods=("streaming",), why=UNSEEN) == rows_of(cache).before(116)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from(["", "rowmax", "bfla", None])), max_size=12
    ),
    st.integers(0, 45),
)
def test_rows_are_what_was_written_there(writes: list[tuple[int, int, str | None]], end: int) -> None:
    """A forward writes behind the first rows, which stay, and what was behind those is gone."""
    truth, cache = list[str | None](), type("Cache", (), {})()
    for begin, count, method in writes:
        truth = [*truth[:begin], *[None] * (begin - len(truth))]
        if method is None:
            forget(cache, begin)
            continue
        write(cache, begin, begin + count, method)
        truth += [method] * count
    told = [*truth[:end], *[None] * (end - len(truth))]
    found = rows_of(cache).before(end)
    assert (told.count(""), told.count(None), end) == (found.dense, found.unknown, found.tokens)
    assert {one for one in told if one} == set(found.methods)
    assert len(rows_of(cache).ranges) <= len(writes) * 2


def test_what_takes_no_word_is_unknown() -> None:
    for odd in (None, (), object()):
        write(odd, 0, 5, "rowmax")
        forget(odd, 0)
        assert Rows() == rows_of(odd)
    assert Before() == Rows().before(0)
