"""Time of one layer's attention on the GPU, as a ratio to cuDNN's dense SDPA in the same run.

32 query and 8 KV heads, head dimension 128, bfloat16, batch 1, causal. Run: ``tox -e bench`` on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from attrs import evolve
from pytest_benchmark.fixture import BenchmarkFixture
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparseprefill import AttentionCall, Memory, Plan, SparseMask, build, default_registry, recall
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.testing import tensors

pytestmark = pytest.mark.gpu
LENGTHS = (32768, 131072)
GROUP = 16


@cache
def call_of(length: int, kind: str = "random") -> AttentionCall:
    shape: dict[str, Any] = {"batch": 1, "heads": 32, "kv_heads": 8, "q_len": length, "kv_len": length, "head_dim": 128}
    return AttentionCall(*tensors(kind, device="cuda", dtype=torch.bfloat16, strength=14.0, **shape))


def dense(call: AttentionCall) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True, enable_gqa=True)


def timed(benchmark: BenchmarkFixture, run: Callable[[], Any], rounds: int = 10) -> float:
    """Median seconds of `run`, the device's work included."""

    def target() -> None:
        run()
        torch.cuda.synchronize()

    benchmark.group = "one layer"
    benchmark.pedantic(target, rounds=rounds, warmup_rounds=3)
    return float(benchmark.stats.stats.median)  # type: ignore[union-attr]


def events(run: Callable[[], Any]) -> float:
    """Median seconds of ten runs by the device's own clock, after three for warming up."""
    times: list[float] = []
    for _ in range(13):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return sorted(times[3:])[5]


@cache
def dense_seconds(length: int) -> float:
    """cuDNN's time, measured once in this run."""
    call = call_of(length)
    return events(lambda: dense(call))


def note(benchmark: BenchmarkFixture, length: int, density: float, seconds: float, **more: float) -> None:

    ratio = dense_seconds(length) / seconds
    benchmark.extra_info.update(length=length, density=density, speedup=ratio, efficiency=ratio * density, **more)


def random_tiles(call: AttentionCall, share: float) -> SparseMask:
    g = call.geometry
    keep = torch.rand(1, g.heads, g.tile_rows(128), g.tile_columns(128), device="cuda") < share
    return SparseMask.from_tiles(call, keep)


def random_stripes(call: AttentionCall, share: float) -> SparseMask:
    """Columns before each group of 2,048 rows, as AnchorAttention selects them."""
    g = call.geometry
    groups = g.tile_rows(128 * GROUP)
    keep = torch.rand(1, g.heads, groups, g.kv_len, device="cuda") < share
    keep &= torch.arange(g.kv_len, device="cuda") < torch.arange(groups, device="cuda")[:, None] * 128 * GROUP
    return evolve(SparseMask.from_stripes(call, keep, GROUP, diagonal=False), disjoint=True)


MASKS: dict[str, Callable[[AttentionCall], SparseMask]] = {
    "full": SparseMask.full,
    **{f"tiles {share:.0%}": partial(random_tiles, share=share) for share in (0.5, 0.25, 0.1, 0.05)},
    **{f"stripes {share:.0%}": partial(random_stripes, share=share) for share in (0.1, 0.05, 0.02)},
    "tiles 5% and stripes 5%": lambda call: random_tiles(call, 0.05) | random_stripes(call, 0.05),
}


@pytest.mark.parametrize("length", LENGTHS)
def test_dense_cudnn(benchmark: BenchmarkFixture, length: int) -> None:
    call = call_of(length)
    note(benchmark, length, 1.0, timed(benchmark, lambda: dense(call)))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", MASKS)
def test_executor(benchmark: BenchmarkFixture, kind: str, length: int) -> None:
    call = call_of(length)
    plan, executor = Plan(MASKS[kind](call)), TritonExecutor()
    note(benchmark, length, plan.mask.density, timed(benchmark, lambda: executor.execute(call, plan)))


METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in default_registry().methods() if name != "dense"},
    "share-prefill": {"clusters": "single"},
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", METHODS)
def test_method(benchmark: BenchmarkFixture, name: str, length: int) -> None:
    """Whole calls at the methods' defaults, the estimator's time inside, on keys of which 5 % stand out."""
    call, pipeline, memory = call_of(length, "stripes"), build(name, **METHODS[name]), Memory()
    result = pipeline.run(call, memory)
    seconds = timed(benchmark, lambda: pipeline.run(call, memory))
    kept = float(recall(call, result, rows=64).mean())
    estimate = events(lambda: pipeline.estimator.estimate(call, memory))
    note(benchmark, length, result.density, seconds, recall=kept, estimate=estimate)
