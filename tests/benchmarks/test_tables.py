"""The cases of every table as benchmarks; `-k methods` runs those of one table."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.run import bench, cases
from lab.bench.case import Case

pytestmark = pytest.mark.gpu
EXTRA = 4 << 30
"""Bytes that a method may need beyond inputs and result for a million tokens on one GPU."""
SLOWER = 1.03
"""Time over dense attention's that the gate may cost, at 4,096 tokens and below."""
SLOW = ("curves", "long")
TABLES = ("captured", "curves", "executor", "long", "methods", "shapes", "short")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{table}-{case}", marks=[pytest.mark.slow] if table in SLOW else [])
        for table in TABLES
        for case in cases(table)
    ],
)
def test_table(benchmark: BenchmarkFixture, case: Case) -> None:
    row = bench(benchmark, case)
    if case.table == "long":
        assert row.extra is not None
        assert row.extra <= EXTRA
    if case.table == "short" and case.gate and case.shape.length <= 4096:
        # Of launches that take microseconds, a few of them are noise.
        assert row.seconds <= SLOWER * row.dense + 5e-6
