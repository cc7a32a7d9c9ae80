"""A million tokens on one GPU: every method runs, within 4 GiB beyond inputs and result."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.run import bench, cases
from experiments.bench.case import Case

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
EXTRA = 4 << 30


@cases("long")
def test_long(benchmark: BenchmarkFixture, case: Case) -> None:
    row = bench(benchmark, case)
    assert row.extra is not None
    assert row.extra <= EXTRA
