"""The executor at other head dimensions, types, groups and batches, relative to cuDNN at the same shape."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from sparseprefill.adapters.bench.case import Case

from benchmarks.run import bench, cases

pytestmark = pytest.mark.gpu


@cases("shapes")
def test_shape(benchmark: BenchmarkFixture, case: Case) -> None:
    bench(benchmark, case)
