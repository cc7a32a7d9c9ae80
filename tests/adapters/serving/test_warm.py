"""Compiling at start: which calls are made up, and that nothing they do stops an engine."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.serving.layer import Layer
from sparseprefill.adapters.serving.warm import Sizes, warm, warm_engine
from sparseprefill.adapters.session.session import Session
from sparseprefill.adapters.vllm.options import parse
from sparseprefill.adapters.vllm.pages import pages_of
from torch import Tensor

from helpers.stubs import Estimate
from sparseprefill import AttentionCall, Memory, Pipeline, Plan, SparseMask, kernels
from sparseprefill.pages import Pages

SIZES = Sizes(
    query_heads=4, kv_heads=2, head_dim=32, page=16, stored=torch.float32, dtype=torch.float32, outside=False, step=48,
    longest=70, device=torch.device("cpu"),
)  # fmt: skip
LAYERS = [Layer(index, 0.2, None, None, None) for index in (3, 5, 8)]


class Kept:
    """A pipeline that keeps its calls and the memories that they came with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[AttentionCall] = []
        self.memories: list[Memory] = []
        self.error = error
        self.pipeline = Pipeline(Estimate(self.estimate))

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        if self.error is not None:
            raise self.error
        self.calls.append(call)
        self.memories.append(memory)
        return Plan(SparseMask.full(call, 16))


def pages(cache: Tensor, table: Tensor, keys: int) -> Pages:
    fp8 = torch.float8_e4m3fn if cache.dtype == torch.uint8 else None
    one = torch.ones(1)
    return pages_of(cache, 32, table, keys, dtype=torch.float32, fp8=fp8, scales=(one, one))


@pytest.mark.parametrize(
    ("step", "longest", "behind", "short"),
    [
        (8192, 131072, [131072, 16381, 32765, 65533, 131069], [(1024, 131072), (1027, 131069)]),
        (2048, 8192, [8192, 4093, 8189], [(128, 8192), (131, 8189)]),
        (128, 500, [500, 253], []),
        (1024, 5000, [5000, 2045, 4093], [(128, 4992), (131, 4989)]),
    ],
)
def test_chunks_behind_all_kinds_of_contexts(
    step: int, longest: int, behind: list[int], short: list[tuple[int, int]]
) -> None:
    """Of many rows, keys of an fp8 cache are copied, by another kernel than the one that reads few rows' in place."""
    made = evolve(SIZES, step=step, longest=longest).calls(tail=128)
    prompts = [(rows, rows, rows) for rows in dict.fromkeys((min(300, step), step))]
    assert [*prompts, (step, step, 2 * step)] == made[: len(prompts) + 1]
    rest = [(step, keys, longest) for keys in behind] + [(*one, longest) for one in short]
    assert rest == made[len(prompts) + 1 :]


def test_a_step_that_holds_the_longest_prompt_may_hold_its_end_alone() -> None:
    made = evolve(SIZES, step=8192, longest=1000).calls(tail=128)
    assert [(300, 300, 300), (896, 896, 896), (1000, 1000, 1000), (497, 1000, 1000)] == made[:4]
    assert [(128, 896, 1000), (131, 893, 1000)] == made[4:]


def test_a_prompt_and_a_chunk_behind_it_run_in_two_layers_of_one_request() -> None:
    kept = Kept()
    warm(kept.pipeline.with_tail(16), LAYERS, SIZES, pages, first_head=4)
    alone = [i for i, call in enumerate(kept.calls) if call.q.shape[2] == 48]
    made = [(kept.calls[i].layer, kept.calls[i].kv_len, kept.calls[i].first_head) for i in alone]
    assert [(layer, keys, 4) for keys in (48, 48, 70) for layer in (3, 5)] == made
    prompts = [kept.calls[i].prompt_lengths for i in alone[::2]]
    assert [48, 96, 70] == prompts, "the prompt's end, what others follow, and the end of the longest"
    memories = [kept.memories[i] for i in alone]
    assert memories[0] is memories[1]
    assert memories[1] is not memories[2]
    assert {0.2} == {call.scale for call in kept.calls}


def test_so_do_two_requests_of_one_step() -> None:
    kept = Kept()
    warm(kept.pipeline.with_tail(16), LAYERS, SIZES, pages, first_head=4)
    both = [(call, memory) for call, memory in zip(kept.calls, kept.memories, strict=True) if call.q.shape[2] == 24]
    sizes = [(call.layer, call.kv_len, call.prompt_lengths, call.first_head) for call, _ in both]
    chunks = [(24, 24), (24, 72), (46, 46)]
    assert [(layer, *chunk, 4) for chunk in chunks for layer in (3, 5) for _ in range(2)] == sizes
    assert both[0][1] is both[2][1] is not both[1][1] is both[3][1]
    for (one, _), (other, _) in zip(both[::2], both[1::2], strict=True):
        assert one.q.untyped_storage().data_ptr() == other.q.untyped_storage().data_ptr()
        assert one.pages is not None
        assert other.pages is not None
        assert one.pages.k.data_ptr() == other.pages.k.data_ptr()


def test_without_a_dense_tail_a_chunk_is_as_a_prompt() -> None:
    kept = Kept()
    warm(kept.pipeline, LAYERS, SIZES, pages)
    assert [48, 48, 70, 70] == [call.prompt_lengths for call in kept.calls if call.q.shape[2] == 48]


def test_requests_of_one_chunk_need_no_second() -> None:
    kept = Kept()
    warm(kept.pipeline, LAYERS[:1], evolve(SIZES, longest=48), pages)
    assert [48, 24, 24, 48, 37, 37] == [call.kv_len for call in kept.calls], "alone, and two in a step, twice"


def test_calls_too_small_for_the_method_run_as_they_will() -> None:
    ran: list[AttentionCall] = []
    kept = Kept()
    plain = kept.pipeline.executor

    class Executor:
        def execute(self, call: AttentionCall, plan: Plan) -> Any:
            ran.append(call)
            return plain.execute(call, plan)

        def accumulate(self, call: AttentionCall, plan: Plan) -> Any:
            return plain.accumulate(call, plan)

    warm(evolve(kept.pipeline, executor=Executor()), LAYERS[:1], evolve(SIZES, small=20), pages)
    assert [48, 48, 32, 20] == [call.q.shape[2] for call in ran]
    assert 3 == len(kept.calls), "the last is none of the method's"


@pytest.mark.parametrize(
    ("outside", "strides"), [(False, (2 * 16 * 64, 64, 2 * 64)), (True, (2 * 16 * 64, 16 * 64, 64))]
)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.uint8], ids=str)
def test_the_cache_is_laid_out_as_vllm_does(stored: torch.dtype, outside: bool, strides: tuple[int, ...]) -> None:
    made = evolve(SIZES, stored=stored, outside=outside)
    cache = made.cache()
    assert ((4, 2, 16, 64), (*strides, 1), stored) == (cache.shape, cache.stride(), cache.dtype)
    kept = Kept()
    warm(kept.pipeline, LAYERS, made, pages)
    for call in kept.calls:
        assert bool(call.k.isfinite().all())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(kernels, "serve_device", lambda _: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def engine(kept: Kept) -> Any:
    session = Session(kept.pipeline)
    served = (SimpleNamespace(session=session),)
    return SimpleNamespace(session=session, every=served, model=SimpleNamespace(first_head=0), warmed=set())


@pytest.mark.usefixtures("device")
def test_once_for_each_kind_of_layer(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    runtime = engine(kept)
    with caplog.at_level(logging.INFO):
        for sizes in (SIZES, SIZES, evolve(SIZES, page=32)):
            warm_engine(runtime, LAYERS, sizes, pages)
    assert 48 == len(kept.calls), "two kinds, four calls, two layers; and two requests of each"
    assert 2 == caplog.text.count("kernels are ready")
    assert not runtime.session.report("", "").layers, "nobody asked for these calls"


@pytest.mark.usefixtures("device")
def test_what_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    runtime = engine(Kept(torch.OutOfMemoryError("no room")))
    with caplog.at_level(logging.INFO):
        warm_engine(runtime, LAYERS, SIZES, pages)
    assert "failed: OutOfMemoryError: no room" in caplog.text
    assert "ready" not in caplog.text


def test_nothing_is_compiled_for_a_cpu() -> None:
    kept = Kept()
    runtime = engine(kept)
    warm_engine(runtime, LAYERS, SIZES, pages)
    assert not kept.calls


@pytest.mark.parametrize(("table", "wanted"), [({}, None), ({"warm_up": True}, True), ({"warm_up": False}, False)])
def test_the_option(table: dict[str, Any], wanted: bool | None) -> None:
    assert wanted is parse({"sparseprefill": {"method": "streaming", **table}}).warm_up
