"""The executor alone on random masks: what a pair costs, as a ratio to cuDNN's dense attention."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.run import bench, cases
from experiments.bench.case import Case

pytestmark = pytest.mark.gpu


@cases("executor")
def test_executor(benchmark: BenchmarkFixture, case: Case) -> None:
    bench(benchmark, case)
