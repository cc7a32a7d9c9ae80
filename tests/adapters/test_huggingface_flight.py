"""Attaching and detaching while forwards run: each ends as it began, and nothing of it stays behind."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.huggingface import attach, masks, state
from torch import Tensor
from transformers import DynamicCache, StaticCache, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import sparseprefill as sp

from . import hf_models
from .hf_models import STREAMING

both = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def build(implementation: str) -> Any:
    model = hf_models.build("llama")
    model.set_attn_implementation(implementation)
    return model


@torch.no_grad()
def logits(model: Any, seed: int = 1, **options: Any) -> Any:
    return model(hf_models.prompt(60, seed=seed), **options).logits


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@both
def test_prefills_while_another_thread_attaches_and_detaches(implementation: str) -> None:
    """With a full mask every way through is the stock model, a mask in the wrong hands is far off, and `strict` raises
    where a forward is served half and half."""
    model, inputs = build(implementation), [hf_models.padded(60, (0, left), seed=left) for left in range(1, 5)]
    with torch.no_grad():
        wanted = [model(**one).logits for one in inputs]
    over, moments = threading.Event(), random.Random(0)
    failures: list[BaseException] = []
    done: list[int] = []

    def prefill(job: int) -> None:
        try:
            with torch.no_grad():
                while not over.is_set():
                    real = inputs[job]["attention_mask"].bool()
                    close(model(**inputs[job]).logits[real], wanted[job][real])
                    done.append(job)
        except BaseException as error:
            failures.append(error)

    def wait(prefills: int) -> None:
        """Until some more have ended, and for a moment more, so that others are anywhere in their middle."""
        ended = len(done) + prefills
        while len(done) < ended and not failures:
            time.sleep(0.001)
        time.sleep(moments.random() * 0.005)

    jobs = [threading.Thread(target=prefill, args=(job,)) for job in range(4)]
    for job in jobs:
        job.start()
    sparse = 0
    try:
        for turn in range(8):
            handle = attach(model, "dense", block=16, verify=turn % 5 == 0, strict=True, gate=None)
            wait(moments.randint(1, 6))
            handle.detach()
            wait(moments.randint(0, 2))
            sparse += sum(layer.sparse_calls for layer in handle.report().layers)
    finally:
        over.set()
        for job in jobs:
            job.join()
    assert not failures, failures[0]
    assert sparse > 8
    assert model.config._attn_implementation == implementation
    assert not model.model._forward_hooks
    assert not model.model._forward_pre_hooks


class Memories:
    """An observer stage that writes into the request's memory, and remembers it weakly."""

    grain = 1

    def __init__(self) -> None:
        self.seen: list[weakref.ref[sp.Memory]] = []

    def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> None:
        memory.setdefault("keys", lambda: call.k)
        self.seen.append(weakref.ref(memory))


@both
def test_an_observer_that_detaches_in_mid_forward(implementation: str) -> None:
    """The forward ends sparse; one that begins inside it is stock; afterwards nothing is left of either."""
    model, memories = build(implementation), Memories()
    pipeline = attrs.evolve(sp.build("streaming", **STREAMING), observers=(memories,))
    stock = logits(model)
    with attach(model, pipeline, gate=None, tail=0):
        wanted = logits(model)
    assert not torch.allclose(wanted, stock, atol=1e-2)
    inside: list[Any] = []

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        if handle.active:
            handle.detach()
            inside.append(logits(model))
            inside.append(model.generate(hf_models.prompt(60), max_new_tokens=2, do_sample=False))

    handle = attach(model, pipeline, observe=observe, gate=None, tail=0)
    cache = DynamicCache(config=model.config)
    got = logits(model, past_key_values=cache)
    assert torch.equal(got, wanted)
    assert torch.equal(inside[0], stock)
    assert torch.equal(logits(model), stock)
    assert [layer.sparse_calls for layer in handle.report().layers] == [1, 1]
    assert not handle.report().fallbacks
    assert model.config._attn_implementation == implementation
    assert not model.model._forward_hooks
    assert state._current.get() is None
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert not [1 for memory in memories.seen if memory() is not None]


@both
@pytest.mark.parametrize("strict", [False, True])
def test_a_forward_in_which_a_hook_attaches_ends_stock(implementation: str, strict: bool) -> None:
    model = build(implementation)
    stock = logits(model)
    handles: list[Any] = []

    def hook(*_: Any) -> None:
        if removable.id in model.model.layers[0]._forward_pre_hooks:
            removable.remove()
            handles.append(attach(model, "streaming", tail=0, strict=strict, gate=None, **STREAMING))

    removable = model.model.layers[0].register_forward_pre_hook(hook)
    assert torch.equal(logits(model), stock)
    assert not torch.allclose(logits(model), stock, atol=1e-2)
    report = handles[0].report()
    assert [layer.sparse_calls for layer in report.layers] == [1, 1]
    assert "outside the attached decoder's forward" in str(report)
    handles[0].detach()
    assert torch.equal(logits(model), stock)


@both
def test_attached_again_while_a_forward_of_the_first_attachment_runs(implementation: str) -> None:
    model = build(implementation)
    stock = logits(model)
    with attach(model, "streaming", tail=0, gate=None, **STREAMING):
        wanted = logits(model)
    handles: list[Any] = []

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        if not handles:
            first.detach()
            handles.append(attach(model, "dense", block=16, gate=None, min_query=20))
            close(logits(model), stock)

    first = attach(model, "streaming", tail=0, observe=observe, gate=None, **STREAMING)
    assert torch.equal(logits(model), wanted)
    close(logits(model), stock)
    assert [layer.sparse_calls for layer in first.report().layers] == [1, 1]
    assert [layer.sparse_calls for layer in handles[0].report().layers] == [2, 2]
    handles[0].detach()
    assert torch.equal(logits(model), stock)
    assert model.config._attn_implementation == implementation


@both
def test_a_handle_is_taken_up_again_in_mid_forward(implementation: str) -> None:
    model = build(implementation)
    turns: list[int] = []

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        if not turns:
            turns.append(call.layer)
            handle.detach()
            handle.bind()

    handle = attach(model, "streaming", tail=0, observe=observe, gate=None, **STREAMING)
    first = logits(model)
    assert handle.active
    assert torch.equal(logits(model), first)
    handle.detach()
    assert model.config._attn_implementation == implementation


@both
def test_an_interrupt_leaves_nothing_to_wait_for(implementation: str) -> None:
    """Torch calls no hook after a KeyboardInterrupt; the forward is over all the same."""
    model = build(implementation)
    stock, cache = logits(model), DynamicCache(config=model.config)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = attach(model, "streaming", tail=0, gate=None, **STREAMING)
    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model, past_key_values=cache)
    hook.remove()
    logits(model)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    hook.remove()
    handle.detach()
    assert model.config._attn_implementation == implementation
    assert not model.model._forward_hooks
    assert torch.equal(logits(model), stock)


@both
@torch.no_grad()
def test_a_mask_made_before_detaching_is_the_stock_mask(implementation: str) -> None:
    """As `generate` makes them, ahead of the forward, for a static cache."""
    model, inputs = build(implementation), hf_models.padded(60, (0, 9))
    real = inputs["attention_mask"].bool()

    def mask(cache: Any) -> Any:
        embeds = torch.empty(2, 60, 0)
        return masking_utils.create_causal_mask(model.config, embeds, real, cache)

    def cache() -> Any:
        return StaticCache(config=model.config, max_cache_len=80)

    wanted = model(inputs["input_ids"], attention_mask=mask(first := cache()), past_key_values=first).logits
    handle, second = attach(model, "streaming", tail=0, gate=None, **STREAMING), cache()
    lazy = mask(second)
    handle.detach()
    got = model(inputs["input_ids"], attention_mask=lazy, past_key_values=second).logits
    assert torch.equal(got, wanted)


class Tail(torch.nn.Module):
    """A layer that computes its last rows alone, with the rows of the mask that belong to them."""

    def __init__(self, layer: Any, rows: int) -> None:
        super().__init__()
        self.layer, self.rows = layer, rows

    def forward(self, hidden: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Hidden states of the last rows; the others pass."""
        attention, norm = self.layer.self_attn, self.layer.input_layernorm
        whole = norm(hidden)
        cos, sin = kwargs["position_embeddings"]
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, -self.rows :]
        shape = (*whole.shape[:2], -1, attention.head_dim)
        q, k, v = (p(whole).view(shape).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation, modeling_llama.eager_attention_forward
        )
        out, _ = interface(attention, q[:, :, -self.rows :], k, v, attention_mask, scaling=attention.scaling)
        out = attention.o_proj(out.reshape(hidden.shape[0], self.rows, -1))
        hidden = torch.cat([hidden[:, : -self.rows], hidden[:, -self.rows :] + out], 1)
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))


@both
@pytest.mark.parametrize("rows", [1, 4, 20])
@torch.no_grad()
def test_a_layer_that_shortens_its_queries_gets_the_rows_of_the_stock_mask(implementation: str, rows: int) -> None:
    model, inputs = build(implementation), hf_models.padded(60, (0, 9))
    model.model.layers[1] = Tail(model.model.layers[1], rows)
    wanted = model(**inputs).logits[:, -rows:]
    with attach(model, "dense", block=16, gate=None, verify=False):
        close(model(**inputs).logits[:, -rows:], wanted)


@both
@pytest.mark.parametrize("inference", [False, True])
def test_whoever_reads_a_lazy_mask_reads_the_stock_mask(implementation: str, inference: bool) -> None:
    model, padding = build(implementation), hf_models.padded(60, (0, 9))["attention_mask"].bool()
    embeds = torch.empty(2, 60, 0)
    with torch.inference_mode(inference):
        wanted: Any = masking_utils.create_causal_mask(model.config, embeds, padding, None)
        with attach(model, "dense", gate=None, verify=False):
            mask: Any = masking_utils.create_causal_mask(model.config, embeds, padding, None)
        assert isinstance(mask, masks.LazyMask)
        assert (mask.shape, mask.dtype, mask.device) == (wanted.shape, wanted.dtype, wanted.device)
        for kept in (mask.contiguous(), mask[..., :60], mask.to(mask.device), mask[:, :, -60:], mask.detach()):
            assert isinstance(kept, masks.LazyMask)
            assert kept.order is mask.order
        assert isinstance(mask.to("meta"), masks.LazyMask)
        readers: list[Callable[[Any], Any]] = [
            lambda x: x + torch.ones(2, 4, 60, 60),
            lambda x: torch.ones(2, 4, 60, 60) + x,
            lambda x: x[:, :, -3:],
            lambda x: x[:, :, 5],
            lambda x: x.to(torch.float16),
            lambda x: torch.cat([x, x], -1),
            lambda x: torch.where(x > -1, 1.0, 2.0),
            lambda x: x.sum(),
        ]
        for read in readers:
            assert type(read(mask)) is Tensor
            assert torch.equal(read(mask), read(wanted))
        assert not mask.order.changed
        mask[:, :, :, 7] = wanted[0, 0, 0, -1]
        assert mask.order.changed, "a mask that somebody wrote into is a custom one"
        assert torch.equal(masks.stock(mask)[:, 0, :, 7], wanted[0, 0, 0, -1].expand(2, 60))


@both
@torch.no_grad()
def test_a_layer_that_writes_into_its_mask_runs_dense_with_what_it_wrote(implementation: str) -> None:
    model, inputs = build(implementation), hf_models.padded(60, (0, 9))

    def write(module: Any, args: Any, kwargs: Any) -> None:
        mask = kwargs["attention_mask"]
        mask[:, :, 40:, :30] = mask[:, :, :1, -1:]  # nobody sees the last key from the first row

    model.model.layers[0].self_attn.register_forward_pre_hook(write, with_kwargs=True)
    wanted = model(**inputs).logits
    with attach(model, "dense", block=16, gate=None, verify=False) as handle:
        assert torch.equal(model(**inputs).logits, wanted)
    assert all("custom" in reason for reason in handle.report().fallbacks)


def test_a_mask_that_has_no_tensor_says_so() -> None:
    asked = {"batch_size": 1, "q_length": 4, "kv_length": 4, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
    mask = masks.LazyMask.of(masks.Order.of(masks.Pattern(), lambda **_: None, asked))
    assert masks.stock(mask) is None
    with pytest.raises(
        sp.AttachError, match="add reads the mask as a tensor, which this attention implementation does not make"
    ):
        _ = mask + 1
