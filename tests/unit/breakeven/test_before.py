"""A prompt behind a cached prefix goes on as that was computed, where anybody knows."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparseprefill as sp
from sparseprefill.breakeven.before import Before
from sparseprefill.breakeven.table import Verdict

STEP = 8192


class Gate:
    """Finds steps worth it that end at so many tokens or more."""

    def __init__(self, least: int) -> None:
        self.least = least

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        worth = call.kv_len >= self.least
        return Verdict(worth, reason="" if worth else "too short")


def chosen(least: int, start: int, end: int, before: Before | None, memory: sp.Memory | None = None) -> Any:
    """The choice for a request that found its first `start` tokens in a cache."""
    x = torch.zeros(()).expand(1, 1, end, 8)
    call = sp.AttentionCall(x[:, :, start : start + STEP], x[:, :, : start + STEP], x[:, :, : start + STEP])
    whole = sp.AttentionCall(call.q, call.k, call.v, prompt_lengths=end)
    route = sp.gated(sp.build("streaming", sink=4, window=16, block=8), Gate(least))
    return route.choose(whole, sp.Memory() if memory is None else memory, STEP, start or None, before)


@pytest.mark.parametrize(
    ("found", "mostly", "said"),
    [
        (Before(sparse=1800, methods=("rowmax",)), "sparse", "1,800 computed sparse by rowmax"),
        (Before(dense=8000), "dense", "8,000 computed dense"),
        (
            Before(sparse=600, dense=300, unknown=200, methods=("a", "b"), why="a store may have brought them"),
            "sparse",
            "600 computed sparse by a, b; 300 computed dense; 200 nobody knows how: a store may have brought them",
        ),
        (Before(sparse=5, dense=5), "unknown", "5 computed sparse; 5 computed dense"),
        (Before(sparse=1, unknown=2), "unknown", "1 computed sparse; 2 nobody knows how"),
        (Before(), "unknown", ""),
    ],
)
def test_more_than_half_of_the_tokens_tell(found: Before, mostly: str, said: str) -> None:
    assert (mostly, said) == (found.mostly, str(found))
    assert found.tokens == found.sparse + found.dense + found.unknown


def test_a_beginning_of_a_sparse_prompt_is_gone_on_with() -> None:
    """A prompt of 4,572 tokens ran sparse; its first 1,800 and 3,072 others would not by themselves."""
    before = Before(sparse=1800, methods=("streaming",))
    assert "" == chosen(4500, 0, 4572, None).dense
    assert "too short" in chosen(4500, 1800, 4872, None).dense
    choice = chosen(4500, 1800, 4872, before)
    assert "" == choice.dense
    assert "behind cached tokens (1,800 computed sparse by streaming) the prompt goes on sparse" == choice.note


def test_a_request_that_was_aborted_goes_on_with_its_own_pages() -> None:
    """12,000 tokens are worth it, and the 8,192 of the first step are not by themselves."""
    assert "" == chosen(10000, 0, 12000, None).dense
    assert "dense, as a prompt of 8,192 tokens would have been" in chosen(10000, 8192, 12000, None).dense
    assert not chosen(10000, 8192, 12000, Before(sparse=8192)).gated


@pytest.mark.parametrize("least", [20000, 12001])
def test_the_second_session_behind_a_shared_beginning_is_judged_as_the_first(least: int) -> None:
    assert "" == chosen(least, 0, 72000, None).dense
    assert "dense, as a prompt of 12,000 tokens" in chosen(least, 12000, 72000, None).dense
    assert "" == chosen(least, 12000, 72000, Before(sparse=12000)).dense
    assert "" == chosen(least, 12000, 72000, Before(sparse=11000, dense=1000)).dense


def test_a_conversation_that_grew_dense_stays_so_and_says_it() -> None:
    """14,000 tokens would run sparse as one prompt, but came turn by turn."""
    assert "" == chosen(10000, 14000, 24000, None).dense
    choice = chosen(10000, 14000, 24000, Before(dense=14000))
    assert choice.gated
    assert "behind cached tokens (14,000 computed dense) the prompt goes on dense" == choice.dense


def test_a_beginning_that_is_too_short_to_bind_is_not_kept_quiet() -> None:
    choice = chosen(10000, 2000, 60000, Before(dense=2000))
    assert "behind cached tokens (2,000 computed dense) the prompt runs sparse, by what is left of it" == choice.note
    assert "" == choice.dense
    choice = chosen(100000, 2000, 60000, Before(sparse=2000))
    assert "too short (58,000 tokens, judged behind the 2,000 before them)" == choice.dense


def test_where_nobody_knows_the_length_is_judged_and_the_reason_says_so() -> None:
    before = Before(unknown=8000, why="OffloadingConnector may have brought them")
    choice = chosen(10000, 8000, 20000, before)
    guess = "dense, as a prompt of 8,000 tokens would have been"
    why = "8,000 nobody knows how: OffloadingConnector may have brought them"
    assert f"too short (judged for the 8,000 tokens before it: {guess}; {why})" == choice.dense
    choice = chosen(7000, 8000, 20000, before)
    assert "" == choice.dense
    assert f"behind cached tokens ({why}) the prompt runs sparse, by what is left of it" == choice.note
    tie = chosen(10000, 8000, 20000, Before(sparse=4000, dense=4000))
    assert tie.dense.endswith(f"{guess}; 4,000 computed sparse; 4,000 computed dense)")


def test_later_chunks_have_the_word_of_the_first() -> None:
    memory = sp.Memory()
    assert "" == chosen(40000, 8000, 30000, Before(sparse=8000), memory).dense
    assert "" == chosen(40000, 16192, 30000, None, memory).dense


def test_what_is_known_of_another_number_of_tokens_counts_for_nothing() -> None:
    assert "as a prompt of 8,192 tokens would have been)" in chosen(10000, 8192, 12000, Before(sparse=8000)).dense
