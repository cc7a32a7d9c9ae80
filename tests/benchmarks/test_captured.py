"""Methods on q, k, v of the embedded model, tiled to the heads of a large one."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.run import bench, cases
from experiments.bench.case import Case

pytestmark = pytest.mark.gpu


@cases("captured")
def test_method_on_captured_inputs(benchmark: BenchmarkFixture, case: Case) -> None:
    bench(benchmark, case)
