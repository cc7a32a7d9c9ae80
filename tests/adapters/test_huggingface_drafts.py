"""Checking a draft is decoding, however long it is; prompts behind a cache are prompts."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach, hooks
from sparseprefill.adapters.huggingface.drafts import ALL, drafted
from transformers import DynamicCache

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING

TWENTY = {"prompt_lookup_num_tokens": 20}


def repeated(length: int = 150, again: int = 60) -> torch.Tensor:
    """A prompt whose end has been seen before, so that its first forward brings a draft along."""
    ids = hf_models.prompt(length - again)
    return torch.cat([ids, ids[:, :again]], 1)


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(**inputs, max_new_tokens=20, do_sample=False, **options)
    return found


@pytest.mark.parametrize("tail", [0, 128])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_prompt_lookup_gives_the_tokens_that_it_gives_without(family: str, tail: int) -> None:
    model, inputs = hf_models.build(family), {"input_ids": repeated()}
    assert torch.equal(generate(model, inputs), generate(model, inputs, **TWENTY))
    with attach(model, "streaming", gate=None, tail=tail, strict=True, **STREAMING) as handle:
        wanted = generate(model, inputs)
        assert torch.equal(wanted, generate(model, inputs, **TWENTY))
    report = handle.report()
    assert {(2, 150, 150)} == {(one.calls, one.query_length, one.key_length) for one in report.layers}, "prompts alone"
    assert hooks.DRAFT in report.notes


@torch.no_grad()
def test_the_prompt_before_a_draft_is_what_it_is_alone() -> None:
    """Row by row, and the rows of the draft are the model's own; padding counts for neither."""
    model, ids = hf_models.build("llama"), repeated()
    seen: list[tuple[int, torch.Tensor]] = []
    padded = torch.cat([torch.zeros(1, 11, dtype=torch.long), ids], 1)
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        seen.append((call.kv_len, result.out))

    with attach(model, "streaming", gate=None, tail=20, observe=observe, **STREAMING):
        for more in ({}, {"prompt_lookup_num_tokens": 20}):
            model.generate(padded, attention_mask=(padded > 0).long(), **options, **more)
    (length, wanted), (drafted, got) = seen[0], seen[2]
    assert (161, 161) == (length, drafted)
    torch.testing.assert_close(wanted[:, :, 11:], got[:, :, 11:])


@torch.no_grad()
def test_an_assistant_with_long_drafts() -> None:
    model, helper = hf_models.build("llama"), hf_models.build("llama", seed=1, num_hidden_layers=1)
    helper.generation_config.num_assistant_tokens = 24
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0.0
    inputs = {"input_ids": hf_models.prompt(120)}
    with (
        attach(model, "streaming", gate=None, tail=0, **STREAMING) as handle,
        attach(helper, "streaming", gate=None, tail=0, **STREAMING) as drafting,
    ):
        wanted = generate(model, inputs)
        assert torch.equal(wanted, generate(model, inputs, assistant_model=helper))
    assert [2, 2] == [one.sparse_calls for one in handle.report().layers]
    assert handle.report().notes[hooks.DRAFT] > 3
    assert [1] == [one.sparse_calls for one in drafting.report().layers], "an assistant has a prompt, too"


@torch.no_grad()
def test_a_long_message_behind_a_cache_is_a_prompt() -> None:
    model, first = hf_models.build("llama"), repeated()
    options = {"return_dict_in_generate": True, "max_new_tokens": 25, "do_sample": False}
    with attach(model, "streaming", gate=None, tail=0, **STREAMING) as handle:
        turn = model.generate(first, **options, **TWENTY)
        length = turn.past_key_values.get_seq_length()
        more = torch.cat([turn.sequences, first[:, :90]], 1)
        model.generate(more, past_key_values=turn.past_key_values, **options)
    found = handle.report().layers[0]
    assert (2, more.shape[1] - length, more.shape[1]) == (found.sparse_calls, found.query_length, found.key_length)


def _assisted_decoding(run: Callable[[], Any], is_first_iteration: bool = True, candidate_length: int = 0) -> Any:
    """Stands on the stack like that of transformers, and has its variables."""
    return run()


@pytest.mark.parametrize(
    ("past", "draft", "calls"),
    [(60, 20, 1), (70, 20, 1), (54, 20, 2), (80, 0, 1), (60, 0, 2), (0, 80, 0), (0, 20, 1)],
)
@torch.no_grad()
def test_a_draft_does_not_make_a_short_message_long(past: int, draft: int, calls: int) -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(90)
    with attach(model, "streaming", gate=None, tail=0, **STREAMING) as handle:
        cache = model(ids[:, :past], use_cache=True).past_key_values if past else DynamicCache(config=model.config)
        _assisted_decoding(lambda: model(ids[:, past:], past_key_values=cache), candidate_length=draft)
    assert [calls] * 2 == [one.sparse_calls for one in handle.report().layers]


def test_what_is_a_draft() -> None:
    owner = object()
    assert [0, 0] == [drafted(owner, past) for past in (0, 9)]
    for first, past, draft, wanted in [(True, 0, 20, 20), (True, 9, 7, 7), (False, 9, 7, ALL), (False, 0, 7, 0)]:
        assert wanted == _assisted_decoding(partial(drafted, owner, past), first, draft)


@torch.no_grad()
def test_a_loop_of_ones_own_says_what_is_a_draft() -> None:
    """A forward of many tokens behind a cache is a prompt as far as anybody can tell."""
    model, ids = hf_models.build("llama"), hf_models.prompt(120)
    with attach(model, "streaming", gate=None, tail=0, strict=True, **STREAMING) as handle:
        cache = model(ids[:, :90], use_cache=True).past_key_values
        handle.detach()
        wanted = model(ids[:, 90:], past_key_values=cache).logits
        cache.crop(-30)
        handle.bind()
        with handle.decoding():
            assert torch.equal(wanted, model(ids[:, 90:], past_key_values=cache).logits)
        assert {hooks.DRAFT: 1} == handle.report().notes
        cache.crop(-30)
        assert not torch.allclose(wanted, model(ids[:, 90:], past_key_values=cache).logits, atol=1e-3)
        assert [2, 2] == [one.sparse_calls for one in handle.report().layers], "another prefill, and no draft"
    assert (30, 120) == (handle.report().layers[0].query_length, handle.report().layers[0].key_length)


@torch.no_grad()
def test_a_mark_is_of_one_model_and_one_thread() -> None:
    model, other = hf_models.build("llama"), hf_models.build("qwen3")
    with (
        attach(model, "streaming", gate=None, tail=0, **STREAMING) as handle,
        attach(other, "streaming", gate=None, tail=0, **STREAMING) as second,
    ):
        with handle.decoding(), second.decoding(), handle.decoding():
            pass
        with handle.decoding():
            hf_models.logits(other)
            elsewhere = threading.Thread(target=hf_models.logits, args=(model,))
            elsewhere.start()
            elsewhere.join()
            hf_models.logits(model)
        hf_models.logits(model)
    assert [2, 2] == [one.sparse_calls for one in handle.report().layers]
    assert [1, 1] == [one.sparse_calls for one in second.report().layers]
    assert {hooks.DRAFT: 1} == handle.report().notes
