"""What a stage, a gate or a plugin may raise at a request: the layer runs dense, recorded, and nothing ends."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.serving.attend import run
from sparseprefill.adapters.serving.failures import LONGEST, ends_engine, reason
from sparseprefill.adapters.serving.layer import Layer
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.parts import Batch, Part
from sparseprefill.adapters.serving.requests import Row
from sparseprefill.adapters.serving.summary import Summary
from sparseprefill.adapters.session.kinds import Why
from sparseprefill.adapters.session.session import Prefill
from sparseprefill.adapters.vllm.options import parse
from sparseprefill.adapters.vllm.runtime import Runtime

import sparseprefill as sp
from helpers.sessions import session
from sparseprefill.profiles.identity import ModelIdentity

TOKENS, HEADS, SIZE = 40, 2, 16
HOSTS = 7.0
"""What the host's attention computes here."""


class SilentError(Exception):
    """As a careless plugin writes it."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Stage:
    """An estimator that keeps every key, or fails where it is told to."""

    grain = 1

    def __init__(self, where: str, error: BaseException) -> None:
        self._where, self._error, self._good = where, error, sp.build("dense", block=16).estimator

    def _at(self, where: str) -> None:
        if where == self._where:
            raise self._error

    def unsupported(self, call: sp.AttentionCall) -> str | None:
        self._at("unsupported")
        return None

    def workspace(self, call: sp.AttentionCall) -> int:
        self._at("workspace")
        return 0

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        self._at("estimate")
        return self._good.estimate(call, memory)


class Gate:
    """A gate that fails, or judges with nonsense."""

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def judge(self, call: sp.AttentionCall, method: str) -> Any:
        if self._error is not None:
            raise self._error
        return None


class Narrow:
    """An executor whose output has another shape."""

    def execute(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
        return sp.Result(call.q[:, :1], call.q[:, :1, :, 0].float(), plan)

    def accumulate(self, call: sp.AttentionCall, plan: sp.Plan) -> Any:
        raise NotImplementedError


class Counts:
    """In the place of the metrics, whose library comes with vLLM."""

    summary = Summary()

    def fallback(self, layer: int, why: Why) -> None:
        assert 0 == layer
        assert why.text


def runtime(pipeline: sp.Pipeline, counts: Any = None, **options: Any) -> Runtime:
    parsed = parse({"sparseprefill": {"method": "dense", "min_query": 8}})
    whole = ModelIdentity(name="m", architecture="M", layers=1, heads=HEADS, kv_heads=HEADS, head_dim=SIZE, digest="d")
    made = session(pipeline, min_query=8, **options)
    tally: Any = counts or Counts()
    return Runtime(parsed, made, Model(whole, whole, "M", "STOCK", 0), tally)


def layer(
    mine: Runtime, requests: int = 1, prompt: int | None = None, meanwhile: Callable[[], None] = lambda: None
) -> torch.Tensor:
    """The output of a layer for a few prompts, as the backend's forward runs it. meanwhile: while the host computes."""
    query = torch.randn(TOKENS * requests, HEADS, SIZE)
    output = torch.full_like(query, float("nan"))

    def stock(part: Part, rows: torch.Tensor, out: torch.Tensor) -> None:
        meanwhile()
        out.fill_(HOSTS)

    parts = Batch(
        Part(i, i + 1, i * TOKENS, (i + 1) * TOKENS, Row(0, TOKENS, str(i), prompt), Prefill(), make=lambda: None)
        for i in range(requests)
    )

    def read(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        kv = torch.randn(2, 1, HEADS, TOKENS, SIZE)
        return kv[0], kv[1]

    assert run(mine, Layer(0, 0.25, None, None, None), parts, query, output, (), read, stock, slow=False)
    return output


def pipeline(where: str = "", error: BaseException | None = None, **more: Any) -> sp.Pipeline:
    return sp.Pipeline(Stage(where, error or ValueError("never")), name="mine", **more)


BROKEN = {
    "estimate": lambda: pipeline("estimate", ZeroDivisionError("by zero")),
    "unsupported": lambda: pipeline("unsupported", ZeroDivisionError("by zero")),
    "workspace": lambda: pipeline("workspace", ZeroDivisionError("by zero"), workspace=1 << 30),
    "shape": lambda: pipeline(executor=Narrow()),
    "silent": lambda: pipeline("unsupported", SilentError()),
    "recursion": lambda: pipeline("unsupported", RecursionError("deep")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_stage_leaves_the_host_its_work(name: str, caplog: pytest.LogCaptureFixture) -> None:
    mine = runtime(BROKEN[name]())
    with caplog.at_level(logging.WARNING):
        output = layer(mine, requests=2)
    assert bool((output == HOSTS).all())
    (found,) = mine.report().layers
    assert found.dense_calls == 2
    assert [2] == list(found.reasons.values())
    assert 1 == len(caplog.records), "said once"


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), SilentError(), None])
def test_a_broken_gate_leaves_the_host_its_work(error: BaseException | None) -> None:
    mine = runtime(pipeline(), gate=Gate(error))
    assert bool((layer(mine) == HOSTS).all())
    (found,) = mine.report().layers
    assert (0, 1) == (found.sparse_calls, found.dense_calls)


@pytest.mark.parametrize(("prompt", "dense"), [(None, 8), (TOKENS, 8), (TOKENS + 4, 4), (TOKENS + 8, 0), (4, TOKENS)])
def test_the_dense_tail_is_the_prompts(prompt: int | None, dense: int) -> None:
    """Of the last 8 rows of a prompt so many are in the chunk; what was generated behind it is dense, too."""
    seen: list[sp.Result] = []
    method = sp.build("streaming", sink=0, window=1, block=4)
    layer(runtime(method, tail=8, observe=lambda _, result: seen.append(result)), prompt=prompt)
    (result,) = seen
    count = (result.mask.to_dense() == result.plan.mask.geometry.visible()).all(-1)[0, 0].sum()
    assert dense + (0 if dense == TOKENS else 4) == count, "the first tile sees nothing else"


def test_a_good_stage_runs() -> None:
    mine = runtime(pipeline())
    assert not bool((layer(mine) == HOSTS).any())
    assert 1 == mine.report().layers[0].sparse_calls


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_who_stops_the_process_stops_it(error: BaseException) -> None:
    with pytest.raises(type(error)):
        layer(runtime(pipeline("unsupported", error)))


def test_a_lost_device_is_no_fallback() -> None:
    with pytest.raises(Exception, match="illegal memory access"):
        layer(runtime(pipeline("estimate", torch.AcceleratorError("CUDA error: an illegal memory access"))))


def test_memory_that_ran_out_is_a_fallback() -> None:
    mine = runtime(pipeline("estimate", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")))
    layer(mine)
    assert "out of memory" in next(iter(mine.report().fallbacks))


class Hungry(Stage):
    """An estimator that fails while it holds a tensor of its own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("estimate", error)
        self.held: list[weakref.ref[torch.Tensor]] = []

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        scores = torch.zeros(8)
        self.held.append(weakref.ref(scores))
        raise type(self._error)(*self._error.args)


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ZeroDivisionError("by zero")])
def test_while_the_host_computes_nothing_holds_what_a_failed_call_used(error: Exception, requests: int) -> None:
    stage, seen = Hungry(error), list[int]()
    mine = runtime(sp.Pipeline(stage, name="mine"))

    def look() -> None:
        seen.append(sum(one() is not None for one in stage.held))

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            layer(mine, requests, meanwhile=look)
    finally:
        gc.enable()
    assert [0] * 2 * requests == seen
    assert 2 * requests == len(stage.held)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: device-side assert triggered\nCompile with ..."), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp"), True),
        (torch.distributed.DistError("a peer is gone"), True),
        (RuntimeError("The size of tensor a (3) must match"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (MemoryError(), False),
        (SilentError(), False),
        (sp.UnsupportedCallError(["my stage has met a CUDA error"]), False),
    ],
)
def test_what_ends_an_engine(error: Exception, lost: bool) -> None:
    assert lost == ends_engine(error)
    wrapped = sp.SparsePrefillError("a stage raised")
    wrapped.__cause__ = error
    assert lost == ends_engine(wrapped)


def test_reasons_are_one_text_for_all_calls_alike() -> None:
    assert "ValueError: no place for <Stage at 0x...>" == reason(ValueError("no place for <Stage at 0x7f2a>\nand more"))
    assert "MemoryError: no message" == reason(MemoryError())
    assert "SilentError: its message cannot be printed (ValueError)" == reason(SilentError())
    assert LONGEST == len(reason(ValueError("x" * 9999)))


def test_a_method_that_fails_to_be_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.adapters.vllm import runtime as module

    def broken(_: Any) -> Any:
        raise ZeroDivisionError("by zero")

    registry = sp.Registry()
    method = attrs.evolve(sp.default_registry().get("dense"), name="broken", build=broken)
    registry.register(SimpleNamespace(sparseprefill_methods=sp.hookimpl(lambda: [method])), "broken")
    monkeypatch.setattr("sparseprefill.config.default_registry", lambda: registry)
    config = SimpleNamespace(additional_config={"sparseprefill": {"method": "broken"}})
    monkeypatch.setattr(module, "show", lambda *_: None)
    whole = ModelIdentity(name="m", architecture="M", layers=1, heads=2, kv_heads=2, head_dim=16, digest="d")
    monkeypatch.setattr(module, "_model", lambda *_: Model(whole, whole, "M", "STOCK", 0))
    with pytest.raises(sp.SparsePrefillError, match="by zero"):
        module.make_runtime(config, "STOCK")
