"""What outlives a forward: memory over the chunks of one prefill, and nothing else."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import gc
import weakref
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.inspection import cache_of
from sparseprefill.adapters.huggingface.state import Requests, is_steady
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, QuantoQuantizedLayer

import sparseprefill as sp
from helpers import hf_models


class Diary:
    """An observer that writes down the layers and offsets it saw, in the request's memory."""

    grain = 1

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> None:
        past = memory.setdefault("past", list)
        past.append(call.layer)
        self.seen.append((call.layer, call.geometry.q_offset, len(past)))


def with_diary() -> tuple[sp.Pipeline, Diary]:
    diary = Diary()
    return attrs.evolve(sp.build("dense", block=16), observers=(diary,)), diary


@torch.no_grad()
def test_memory_goes_on_over_chunks_and_ends_with_the_prefill() -> None:
    model, (pipeline, diary) = hf_models.build("llama"), with_diary()
    with attach(model, pipeline) as handle:
        out = model.generate(
            hf_models.prompt(96), max_new_tokens=3, do_sample=False, prefill_chunk_size=32, return_dict_in_generate=True
        )
        chunks = [(0, 0, 1), (1, 0, 2), (0, 32, 3), (1, 32, 4), (0, 64, 5), (1, 64, 6)]
        assert diary.seen == chunks
        turn = torch.cat([out.sequences, hf_models.prompt(20, seed=4)], -1)
        model.generate(turn, past_key_values=out.past_key_values, max_new_tokens=1, do_sample=False)
        assert diary.seen[6:] == [(0, 98, 1), (1, 98, 2)], "another turn is another prefill"
        model(hf_models.prompt(40))
        assert diary.seen[8:] == [(0, 0, 1), (1, 0, 2)]
    assert handle.report().notes == {}


class Counted:
    """An observer that writes down what is kept of the keys, and which memory it is in."""

    grain = 1

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.memories: list[weakref.ref[sp.Memory]] = []

    def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> None:
        self.seen.append((call.layer, memory.nbytes))
        self.memories.append(weakref.ref(memory))


def weighted(counted: Counted, **more: Any) -> sp.Pipeline:
    """A method that weighs its scores by norms of values, which go on from chunk to chunk."""
    plain = sp.build("bfla", block=16, group=4, tile=16, local_tiles=1, stride=None)
    assert isinstance(plain, sp.Pipeline)
    refiners = (sp.ValueWeights(2.0, pool=8), sp.RelativeThreshold(0.5, sink=0, local=0))
    return attrs.evolve(plain, refiners=refiners, observers=(counted,), **more)


@torch.no_grad()
def test_what_is_kept_of_values_goes_on_over_chunks_and_changes_nothing() -> None:
    model, counted = hf_models.build("llama"), Counted()
    options: Any = {
        **{"max_new_tokens": 3, "do_sample": False, "prefill_chunk_size": 32},
        **{"return_dict_in_generate": True, "output_logits": True},
    }
    with attach(model, weighted(Counted(), kept_bytes=0), tail=0, gate=None):
        expected = model.generate(hf_models.prompt(96), **options)
    with attach(model, weighted(counted), tail=0, gate=None) as handle:
        found = model.generate(hf_models.prompt(96), **options)
    assert torch.equal(torch.stack(expected.logits), torch.stack(found.logits))
    assert all((layer.density or 1.0) < 1 for layer in handle.report().layers)
    heads = model.config.num_key_value_heads * 4
    # Nothing of the first chunk, since nobody says that the prompt goes on; then a number for eight keys of each head.
    kept = [(0, 0), (1, 0), (0, 8 * heads), (1, 16 * heads), (0, 20 * heads), (1, 24 * heads)]
    assert kept == counted.seen
    gc.collect()
    assert not [one for one in counted.memories if one() is not None], "all is freed when the request decodes"


@torch.no_grad()
def test_of_a_cache_that_changes_its_keys_nothing_is_kept() -> None:
    cache = DynamicCache(config=hf_models.build("llama").config)
    assert is_steady(cache)
    assert not is_steady(None)
    cache.layers.append(object.__new__(QuantoQuantizedLayer))
    assert not is_steady(cache)
    cache.layers[-1] = type("Mine", (DynamicLayer,), {"__module__": "elsewhere"})()
    assert not is_steady(cache)


@torch.no_grad()
def test_a_cache_that_the_model_made_goes_on_too() -> None:
    model, (pipeline, diary) = hf_models.build("llama"), with_diary()
    ids = hf_models.prompt(96)
    with attach(model, pipeline):
        cache = model(ids[:, :48], use_cache=True).past_key_values
        model(ids[:, 48:], past_key_values=cache)
        assert diary.seen[2:] == [(0, 48, 3), (1, 48, 4)]
        cache.crop(-16)
        model(ids[:, 80:], past_key_values=cache)
        assert diary.seen[4:] == [(0, 80, 1), (1, 80, 2)], "a cropped cache begins anew"


@torch.no_grad()
def test_decoding_ends_a_prefill_even_if_it_is_taken_back() -> None:
    """A cache that is cropped to where its prefill ended goes on with other tokens: that is another prefill."""
    model, (pipeline, diary) = hf_models.build("llama"), with_diary()
    ids = hf_models.prompt(96)
    with attach(model, pipeline, gate=None):
        cache = model(ids[:, :48], use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)
        cache.crop(-1)
        assert cache.get_seq_length() == 48
        model(ids[:, 48:], past_key_values=cache)
    assert diary.seen == [(0, 0, 1), (1, 0, 2), (0, 48, 1), (1, 48, 2)]


@pytest.mark.parametrize("lefts", [(0,), (0, 0)])
@torch.no_grad()
def test_chunks_at_the_grain_change_nothing(lefts: tuple[int, ...]) -> None:
    model, inputs = hf_models.build("llama"), hf_models.padded(128, lefts)
    with attach(model, "anchor-attention", tail=0, theta=1.0, step=2, block=16, init_tokens=16) as handle:
        whole = model(**inputs).logits
        assert handle.report().grain == 32
        cache = DynamicCache(config=model.config)
        parts = []
        for first in range(0, 128, 64):
            ids, mask = inputs["input_ids"][:, first : first + 64], inputs["attention_mask"][:, : first + 64]
            parts.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)
    assert handle.report().notes == {}
    assert (handle.report().density or 1.0) < 0.95


@torch.no_grad()
def test_a_cut_off_the_grain_is_noted() -> None:
    model = hf_models.build("llama")
    options = {"max_new_tokens": 1, "do_sample": False, "prefill_chunk_size": 40}
    with attach(model, "anchor-attention", tail=0, theta=1.0, step=2, block=16, init_tokens=16) as handle:
        model.generate(hf_models.prompt(80), **options)
    assert list(handle.report().notes) == [
        "prefill was cut at token 40; its grain is 32 tokens, so the cut may change what is selected"
    ]
    with attach(model, "vertical-slash", tail=0, gamma=0.6, block=16) as handle:
        model.generate(hf_models.prompt(80), **options)
    assert any("has no grain" in note for note in handle.report().notes)


class Cache:
    """Weakly referable, as transformers' caches are."""


def test_requests() -> None:
    requests, cache = Requests(), Cache()
    progress, goes_on = requests.advance(cache, 0, 10, 1)
    assert not goes_on
    requests.keep(cache, progress)
    for past, batch, wanted in ((10, 1, True), (11, 1, False), (0, 1, False), (10, 2, False)):
        again, goes_on = requests.advance(cache, past, 5, batch)
        assert goes_on is wanted
        assert (again.prefill is progress.prefill) is wanted
        assert again.end == past + 5
    requests.drop(cache)
    assert not requests.advance(cache, 10, 5, 1)[1]
    requests.keep(cache, progress)
    assert len(requests) == 1
    del cache
    gc.collect()
    assert len(requests) == 0


@torch.no_grad()
def test_sparse_rows_do_not_depend_on_their_padding() -> None:
    model: Any = hf_models.build("llama")
    inputs = hf_models.padded(110, (0, 23))
    with attach(model, "anchor-attention", tail=0, theta=1.0, step=2, block=16, init_tokens=16) as handle:
        batch = model(**inputs).logits[1, 23:]
        alone = model(inputs["input_ids"][1:, 23:]).logits[0]
    torch.testing.assert_close(batch, alone, atol=2e-5, rtol=1e-4)
    assert not handle.report().fallbacks


@torch.no_grad()
def test_a_cache_that_comes_back_in_a_tuple_goes_on() -> None:
    """A configuration may ask for tuples; the cache in them is that of the prefill all the same."""
    ids = hf_models.prompt(96)
    found: list[Any] = []
    for tuples in (False, True):
        model = hf_models.build("llama").model
        model.config.return_dict = not tuples
        with attach(
            model, "anchor-attention", gate=None, tail=0, theta=0.0, block=16, step=2, init_tokens=16
        ) as handle:
            first = model(ids[:, :50], use_cache=True)
            cache = next(one for one in first if hasattr(one, "layers")) if tuples else first.past_key_values
            found.append(model(ids[:, 50:], past_key_values=cache)[0])
        assert ["prefill was cut at token 50"] == [note.split(";")[0] for note in handle.report().notes]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_found_under_the_names_of_old_and_new_versions(name: str) -> None:
    """transformers 5.24 renamed the argument of every forward, and what it gives back."""
    made = DynamicCache()
    assert made is cache_of({"input_ids": None, name: made})
    assert made is cache_of({"cache": None, "past_key_values": None, name: made})
    assert None is cache_of({"input_ids": None, name: None})
