"""Short prompts, with and without the break-even gate: behind it no call may be much slower than dense attention."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.run import bench, cases
from experiments.bench.case import Case

pytestmark = pytest.mark.gpu
SLOWER = 1.03
"""Time over dense attention's that the gate may cost, at 4,096 tokens and below."""


@cases("short")
def test_short(benchmark: BenchmarkFixture, case: Case) -> None:
    row = bench(benchmark, case)
    if case.gate and case.shape.length <= 4096:
        # Of launches that take microseconds, a few of them are noise.
        assert row.seconds <= SLOWER * row.dense + 5e-6
