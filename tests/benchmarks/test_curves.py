"""Recall against time, over the parameters of a method."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.run import bench, cases
from experiments.bench.case import Case

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@cases("curves")
def test_setting(benchmark: BenchmarkFixture, case: Case) -> None:
    bench(benchmark, case)
