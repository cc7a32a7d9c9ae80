"""Attaching and prefilling whatever torch's defaults are, and from several threads at once."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from torch import Tensor
from transformers import DynamicCache

import sparseprefill as sp
from helpers import hf_models

METHODS = sorted(sp.default_registry().methods())
THREADS = 8
T = TypeVar("T")


@contextmanager
def defaults(*, device: str | None = None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def prefilled(model: Any, method: str, ids: Tensor) -> list[Tensor]:
    """Logits of a prompt in two chunks, and at once, every call of it sparse; with a measured recall and a report."""
    known = sp.default_registry().get(method)
    parameters = {**known.small, **known.stand_in}
    with torch.no_grad(), attach(model, method, gate=None, tail=0, strict=True, recall_every=1, **parameters) as handle:
        cache = DynamicCache()
        found = [model(part, past_key_values=cache).logits for part in ids.split(64, 1)]
        found.append(model(ids, use_cache=False).logits)
        assert all(0 < layer.density <= 1 for layer in handle.report().layers if layer.density is not None)
    return found


@pytest.mark.parametrize("changed", [{"device": "meta"}, {"dtype": torch.float64}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_defaults_of_torch_change_nothing(method: str, changed: dict[str, Any]) -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt()
    expected = prefilled(model, method, ids)
    with defaults(**changed):
        actual = prefilled(model, method, ids)
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


def together(run: Callable[[int], T]) -> list[T | Exception]:
    """What each of eight threads gives or raises, which begin at one moment."""
    ready = threading.Barrier(THREADS)

    def wait(number: int) -> T | Exception:
        ready.wait()
        try:
            return run(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(wait, range(THREADS)))


@torch.no_grad()
def test_threads_that_attach_models_of_their_own() -> None:
    ids = hf_models.prompt()
    names = [METHODS[number % len(METHODS)] for number in range(THREADS)]
    models = [hf_models.build("llama", seed=number) for number in range(THREADS)]
    stock = [model(ids).logits for model in models]
    expected = [prefilled(*pair, ids) for pair in zip(models, names, strict=True)]
    for _ in range(3):
        for number, found in enumerate(together(lambda n: prefilled(models[n], names[n], ids))):
            assert isinstance(found, list), found
            assert all(torch.equal(*pair) for pair in zip(expected[number], found, strict=True))
    assert all(torch.equal(model(ids).logits, one) for model, one in zip(models, stock, strict=True))
    assert {"sdpa"} == {model.config._attn_implementation for model in models}


@torch.no_grad()
def test_threads_that_attach_one_model() -> None:
    """One of them does; the others are told so, and the record holds no forward of theirs."""
    model, ids = hf_models.build("llama"), hf_models.prompt()
    stock = model(ids).logits
    for _ in range(5):
        found = together(lambda _: attach(model, "streaming", gate=None, tail=0, strict=True, **hf_models.STREAMING))
        errors = [one for one in found if isinstance(one, Exception)]
        (handle,) = [one for one in found if not isinstance(one, Exception)]
        assert THREADS - 1 == len(errors)
        assert {sp.AttachError} == {type(error) for error in errors}
        assert all("is being attached already" in str(one) or "detach that first" in str(one) for one in errors)
        assert not any(layer.calls for layer in handle.report().layers)
        assert not torch.equal(stock, model(ids).logits)
        assert [1, 1] == [layer.sparse_calls for layer in handle.report().layers]
        handle.detach()
        assert torch.equal(stock, model(ids).logits)


def test_a_model_can_be_attached_after_an_attempt_that_failed() -> None:
    model = hf_models.build("llama")
    with pytest.raises(sp.ParameterError, match="layers names 7"):
        attach(model, "streaming", layers=[7], **hf_models.STREAMING)
    attach(model, "streaming", **hf_models.STREAMING).detach()


FRESH = f"""
import threading
from concurrent.futures import ThreadPoolExecutor
ready = threading.Barrier({THREADS})

def run(number):
    import torch
    import sparseprefill as sp
    ready.wait()
    names = sorted(sp.methods())
    q = torch.ones(1, 2, 40, 16)
    method = sp.default_registry().get(names[number])
    return method.pipeline(**method.small)(q, q, q).isfinite().all().item()

with ThreadPoolExecutor({THREADS}) as pool:
    assert all(pool.map(run, range({THREADS})))
"""


def test_threads_that_load_plugins_at_once() -> None:
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=300)
