"""A million tokens on one GPU: every method runs, within 4 GiB beyond inputs and result."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from sparseprefill.adapters.bench.case import Case

from benchmarks.run import bench, cases

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
EXTRA = 4 << 30


@cases("long")
def test_long(benchmark: BenchmarkFixture, case: Case) -> None:
    row = bench(benchmark, case)
    assert row.extra is not None
    assert row.extra <= EXTRA
