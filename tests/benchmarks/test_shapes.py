"""The executor at other head dimensions, types, groups and batches, relative to cuDNN at the same shape."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.run import bench, cases
from experiments.bench.case import Case

pytestmark = pytest.mark.gpu


@cases("shapes")
def test_shape(benchmark: BenchmarkFixture, case: Case) -> None:
    bench(benchmark, case)
