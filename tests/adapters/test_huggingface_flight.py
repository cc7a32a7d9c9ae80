"""Attaching and detaching while forwards run: each ends as it began, and nothing of it stays behind."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.huggingface import attach, state
from transformers import DynamicCache

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING

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
