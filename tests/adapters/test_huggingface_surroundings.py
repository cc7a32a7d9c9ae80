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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GPT2Config, GPT2DoubleHeadsModel

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


Function = Callable[[Tensor], Tensor]


class Counting(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Listening(TorchFunctionMode):
    """Sees every function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def within(mode: Any) -> Callable[[Function, Tensor], Tensor]:
    def run(function: Function, x: Tensor) -> Tensor:
        with mode():
            return function(x)

    return run


def with_duals(function: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(function(forward_ad.make_dual(x, x)))
        assert found.tangent is not None
        return torch.stack([found.primal, found.tangent])


def traced(function: Function, x: Tensor) -> Tensor:
    made: Tensor = make_fx(function)(x)(x)
    return made


def faked(function: Function, x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = function(mode.from_tensor(x)).shape
    return torch.zeros(shape)


STOCK: dict[str, tuple[Callable[[Function, Tensor], Any], str]] = {
    "jvp": (lambda f, x: torch.stack(torch.func.jvp(f, (x,), (x,))), "torch.func"),
    "vmap": (lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])), "torch.func"),
    "vmap of jvp": (
        lambda f, x: torch.func.vmap(lambda z: torch.func.jvp(f, (z,), (z,))[1])(torch.stack([x, 2 * x])),
        "torch.func",
    ),
    "grad": (lambda f, x: torch.func.grad(lambda z: f(z).sum())(x), "torch.func"),
    "functionalize": (lambda f, x: torch.func.functionalize(f)(x), "torch.func"),
    "dual tensors": (with_duals, "gradients are recorded forward"),
    "make_fx": (traced, "mode"),
    "fake tensors": (faked, "FakeTensorMode"),
    "a mode of operations": (within(Counting), "Counting"),
    "a mode of functions": (within(Listening), "Listening"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["dense", "streaming", "rowmax"])
@pytest.mark.parametrize(("run", "said"), STOCK.values(), ids=STOCK)
def test_transforms_and_modes_run_the_stock_model(run: Any, said: str, method: str) -> None:
    """To the bit, recorded with a reason; and later prefills of the same length meet nothing of it."""
    model, other = (hf_models.build("llama", attn_implementation="eager") for _ in range(2))
    length = 131 + [one for one, _ in STOCK.values()].index(run)
    model.set_attn_implementation("eager")
    model.requires_grad_(False)
    ids = hf_models.prompt(length)
    embeds, known = model.get_input_embeddings()(ids).detach(), sp.default_registry().get(method)

    def logits(z: Tensor) -> Tensor:
        # With a cache transformers asks nothing of values, which cannot be traced.
        made: Tensor = model(inputs_embeds=z, past_key_values=DynamicCache()).logits
        return made

    expected = run(logits, embeds)
    with attach(model, method, gate=None, tail=0, **{**known.small, **known.stand_in}) as handle:
        actual = run(logits, embeds)
        (reason,) = handle.report().fallbacks
        assert said in reason
        assert {"dense"} == {layer.mode for layer in handle.report().layers}
    assert torch.equal(expected, actual)
    for one in (model, other):
        assert all(bool(x.isfinite().all()) for x in prefilled(one, method, ids))


@torch.no_grad()
def test_a_cache_that_was_filled_in_a_mode_begins_a_prefill_of_its_own() -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(96)
    with attach(model, "streaming", gate=None, tail=0, **hf_models.STREAMING) as handle:
        cache = DynamicCache(config=model.config)
        with Counting():
            model(ids[:, :48], past_key_values=cache)
        model(ids[:, 48:], past_key_values=cache)
    report = handle.report()
    assert [(1, 1)] * 2 == [(layer.dense_calls, layer.sparse_calls) for layer in report.layers]
    assert {} == dict(report.notes)


def test_nothing_is_verified_within_a_transform_or_a_mode() -> None:
    model = hf_models.build("llama")
    with Counting(), pytest.raises(sp.AttachError, match=r"cannot be verified here.*Counting.*verify=False"):
        attach(model, "dense")
    with Counting(), attach(model, "dense", verify=False):
        pass


@torch.no_grad()
def test_a_model_without_numbers_is_stock() -> None:
    model, ids = hf_models.build("llama").to("meta"), hf_models.prompt(96).to("meta")
    with pytest.raises(sp.AttachError, match=r"meta device hold no numbers: load the model's weights.*verify=False"):
        attach(model, "streaming")
    with attach(model, "streaming", gate=None, verify=False) as handle:
        cache = DynamicCache(config=model.config)
        assert model(ids, past_key_values=cache).logits.is_meta
        assert model(ids, past_key_values=cache).logits.is_meta
    (reason,) = handle.report().fallbacks
    assert "meta device" in reason


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("choices", [1, 2, 20])
@torch.no_grad()
def test_ids_of_several_choices_are_as_long_as_their_texts(choices: int) -> None:
    sizes: Any = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 300, "num_labels": 1}
    model = GPT2DoubleHeadsModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    ids = hf_models.prompt(90, choices)[None]
    ends = torch.full((1, choices), 89)
    with attach(model, "streaming", gate=None, tail=0, **hf_models.STREAMING) as handle:
        model(ids, mc_token_ids=ends)
        model(ids[..., :9], mc_token_ids=ends.clamp(max=8))
    report = handle.report()
    assert [(1, 0)] * 2 == [(layer.sparse_calls, layer.dense_calls) for layer in report.layers]
    assert {} == dict(report.fallbacks)
    assert (choices < 16) == report.short_forwards


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
