"""What outlives a forward: memory over the chunks of one prefill, and nothing else."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.inspection import cache_of
from sparseprefill.adapters.huggingface.state import Requests, is_steady, tensors_of
from sparseprefill.adapters.session.session import Prefill
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


class Cache:  # noqa: PLW1641
    """Weakly referable, as transformers' caches are. Like every class with `__eq__` alone it has no hash."""

    def __init__(self) -> None:
        self.keys = [torch.zeros(1, 2, 10, 4), torch.ones(1, 2, 10, 4)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cache)


def test_requests() -> None:
    requests, cache, other, prefill = Requests(), Cache(), Cache(), Prefill()
    requests.keep(cache, prefill, 10)
    requests.keep(other, Prefill(), 10)
    assert 2 == len(requests), "equal, but not the same"
    assert (prefill, True) == requests.advance(cache, 10)
    for past in (11, 0):
        assert not requests.advance(cache, past)[1]
    assert requests.advance(cache, 10)[0] is prefill
    requests.drop(cache)
    assert not requests.advance(cache, 10)[1]
    requests.keep(cache, prefill, 10)
    del cache, other
    gc.collect()
    assert 0 == len(requests)
    for odd in ((), [], object(), None):  # nothing weak, or nothing to tell by
        requests.keep(odd, prefill, 10)
        assert not requests.advance(odd, 10)[1]
        requests.drop(odd)


def _into(layer: Any) -> None:
    layer.keys[:, :, 5] = 0


def _storage(layer: Any) -> None:
    layer.values.data = layer.values.data.clone()


def _swapped(cache: Any) -> None:
    cache.layers.reverse()


def _copied(cache: Any) -> None:
    cache.layers[1] = copy.deepcopy(cache.layers[1])


def _grown_back(cache: Any) -> None:
    last = [(layer.keys[:, :, -1:], layer.values[:, :, -1:]) for layer in cache.layers]
    cache.crop(-1)
    for index, (keys, values) in enumerate(last):
        cache.update(keys, values, index)


SWAP = torch.tensor([1, 0])
CHANGES: dict[str, Any] = {
    "reordered": lambda cache: cache.reorder_cache(SWAP),
    "selected": lambda cache: cache.batch_select_indices(SWAP),
    "repeated": lambda cache: (cache.batch_select_indices(SWAP[:1]), cache.batch_repeat_interleave(2)),
    "one row": lambda cache: cache.batch_select_indices(SWAP[:1]),
    "more rows": lambda cache: cache.batch_repeat_interleave(2),
    "cropped and grown back": _grown_back,
    "written into": lambda cache: _into(cache.layers[0]),
    "another storage": lambda cache: _storage(cache.layers[1]),
    "layers swapped": _swapped,
    "a layer copied": _copied,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_cache_that_was_changed_is_that_of_another_prefill(change: Any) -> None:
    """What was remembered was remembered of other keys: the same is chosen as for a fresh copy of the cache."""
    model, ids = hf_models.build("llama"), hf_models.prompt(96, 2)
    _, diary = with_diary()
    method = attrs.evolve(weighted(Counted()), observers=(diary,))
    with attach(model, method, tail=0, gate=None):
        cache = DynamicCache(config=model.config)
        for first in (0, 32):
            model(ids[:, first : first + 32], past_key_values=cache)
        assert [(0, 0, 1), (1, 0, 2), (0, 32, 3), (1, 32, 4)] == diary.seen
        change(cache)
        fresh = copy.deepcopy(cache)
        rows = ids[:1].expand(next(tensors_of(cache)).shape[0], -1)
        expected = model(rows[:, 64:], past_key_values=fresh).logits
        actual = model(rows[:, 64:], past_key_values=cache).logits
    assert [(0, 64, 1), (1, 64, 2)] * 2 == diary.seen[4:]
    assert torch.equal(expected, actual)


@pytest.mark.parametrize("inference", [False, True])
def test_a_cache_that_nobody_touched_goes_on(inference: bool) -> None:
    """Inference tensors do not tell whether they were written to: their prefill goes on, without statistics of keys."""
    model, ids, counted = hf_models.build("llama"), hf_models.prompt(96), Counted()
    _, diary = with_diary()
    method = attrs.evolve(weighted(counted), observers=(counted, diary))
    with torch.inference_mode(inference), torch.no_grad(), attach(model, method, tail=0, gate=None):
        cache = DynamicCache(config=model.config)
        for first in (0, 32, 64):
            model(ids[:, first : first + 32], past_key_values=cache)
    assert [1, 2, 3, 4, 5, 6] == [count for *_, count in diary.seen]
    assert inference == (not any(kept for _, kept in counted.seen))


@torch.no_grad()
def test_a_cache_without_a_hash_is_one_like_any_other() -> None:
    """By identity: of two that call themselves equal each has a prefill of its own."""

    class Equal(DynamicCache):  # noqa: PLW1641
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

    model, ids = hf_models.build("llama"), hf_models.prompt(96)
    pipeline, diary = with_diary()
    with attach(model, pipeline):
        caches = [Equal(config=model.config) for _ in range(2)]
        for cache in caches:
            model(ids[:, :48], past_key_values=cache)
        for cache in caches:
            model(ids[:, 48:], past_key_values=cache)
    assert [1, 2, 1, 2, 3, 4, 3, 4] == [count for *_, count in diary.seen]


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
