"""Attaching and detaching: what is restored, what two models share, threads, errors in the middle."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach, state
from transformers import LlamaForCausalLM

import sparseprefill as sp

from . import hf_models
from .hf_models import STREAMING, logits


@pytest.fixture
def model() -> Any:
    return hf_models.build("llama")


def test_detach_restores_to_the_bit(model: Any) -> None:
    wanted, implementation = logits(model), model.config._attn_implementation
    hooks = len(model.model._forward_hooks), len(model.model._forward_pre_hooks)
    handle = attach(model, "streaming", **STREAMING)
    assert "attached: streaming on LlamaForCausalLM" in repr(handle)
    assert not torch.equal(logits(model), wanted)
    handle.detach()
    handle.detach()
    assert "detached" in repr(handle)
    assert torch.equal(logits(model), wanted)
    assert model.config._attn_implementation == implementation
    assert (len(model.model._forward_hooks), len(model.model._forward_pre_hooks)) == hooks
    with attach(model, "dense", block=16):
        pass
    assert torch.equal(logits(model), wanted)


def test_two_models_have_two_methods(model: Any) -> None:
    other = hf_models.build("qwen3", seed=3)
    stock = logits(model), logits(other)
    with attach(model, "dense", block=16) as first, attach(other, "streaming", **STREAMING) as second:
        torch.testing.assert_close(logits(model), stock[0], atol=2e-5, rtol=1e-4)
        assert not torch.allclose(logits(other), stock[1], atol=1e-2)
    assert (first.report().method, second.report().method) == ("dense", "streaming")
    assert (first.report().density, first.report().layers[0].calls) == (1.0, 1)
    assert torch.equal(logits(other), stock[1])


def test_models_that_share_a_config(model: Any) -> None:
    torch.manual_seed(9)
    other = LlamaForCausalLM(model.config).eval()
    stock = logits(other)
    with attach(model, "streaming", **STREAMING) as handle:
        torch.testing.assert_close(logits(other), stock)
        with pytest.raises(sp.AttachError, match="shares its config"):
            attach(other, "dense")
    assert handle.report().layers[0].calls == 0
    with attach(model, "dense"), pytest.raises(sp.AttachError, match="attached already"):
        attach(model, "dense")


def test_copies_are_stock_models_before_and_after_detaching(model: Any) -> None:
    wanted = logits(model)
    with attach(model, "streaming", **STREAMING):
        twin = copy.deepcopy(model)
        torch.testing.assert_close(logits(twin), wanted)
    torch.testing.assert_close(logits(twin), wanted)


def test_a_dropped_model_takes_its_handle_along(model: Any) -> None:
    fresh = hf_models.build("llama")
    handle = weakref.ref(attach(fresh, "dense"))
    gone = weakref.ref(fresh)
    del fresh
    gc.collect()
    assert gone() is None
    assert handle() is None


@torch.no_grad()
def test_an_error_inside_the_forward_closes_it(model: Any) -> None:
    wanted = logits(model)

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    with attach(model, "dense", block=32) as handle:
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            logits(model)
        hook.remove()
        assert state.current(handle.state) is None
        torch.testing.assert_close(logits(model), wanted, atol=2e-5, rtol=1e-4)
    assert not handle.report().fallbacks


def test_an_observer_that_fails_is_heard(model: Any) -> None:
    def fail(call: sp.AttentionCall, result: sp.Result) -> None:
        raise KeyError("mine")

    with attach(model, "dense", observe=fail) as handle, pytest.raises(KeyError, match="mine"):
        logits(model)
    assert state.current(handle.state) is None


def test_threads_share_a_model(model: Any) -> None:
    prompts = [hf_models.prompt(60 + 7 * i, seed=i) for i in range(6)]

    @torch.no_grad()
    def run(ids: torch.Tensor) -> Any:
        return model.generate(ids, max_new_tokens=4, do_sample=False)

    with attach(model, "streaming", **STREAMING) as handle:
        wanted = [run(ids) for ids in prompts]
        got: dict[int, torch.Tensor] = {}
        jobs = [threading.Thread(target=lambda i=i: got.update({i: run(prompts[i])})) for i in range(6)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    assert all(torch.equal(got[i], wanted[i]) for i in range(6))
    assert handle.report().layers[0].sparse_calls == 12
    assert not handle.report().fallbacks
