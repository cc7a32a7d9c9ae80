"""Whole calls of every method at its defaults, on made-up heads: time, estimator inside, density, exact recall."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.run import bench, cases
from experiments.bench.case import Case

pytestmark = pytest.mark.gpu


@cases("methods")
def test_method(benchmark: BenchmarkFixture, case: Case) -> None:
    bench(benchmark, case)
