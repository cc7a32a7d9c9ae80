"""Runs a case of `lab.bench` as a benchmark of pytest, and keeps its row for the summary."""

from __future__ import annotations

from statistics import median

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from lab.bench import facts, tables
from lab.bench.baseline import baseline
from lab.bench.captured import inputs
from lab.bench.case import Case
from lab.bench.clock import Clock
from lab.bench.measure import Row, prepare
from lab.bench.report import title
from lab.bench.shape import Shape
from sparseprefill import default_registry

ROWS: list[Row] = []
CLOCK = Clock(torch.device("cuda"))


def cases(table: str) -> list[Case]:
    """The cases of a table, at its lengths on a GPU."""
    shapes = [Shape(length=length) for length in tables.lengths(table, "cuda")]
    return tables.cases(table, default_registry(), shapes)


def bench(benchmark: BenchmarkFixture, case: Case) -> Row:
    """Benchmark a case with dense attention before and after it. Figures are by the device's own clock; a round of
    pytest-benchmark holds several runs where they are short (`Clock.in_a_row`)."""
    ready = prepare(case, CLOCK.device, dense=baseline, inputs=inputs)
    first = CLOCK.once(ready.dense.run)
    long = first > CLOCK.budget
    dense = [first] if long else CLOCK.times(ready.dense.run, share=0.5)
    times: list[float] = []
    benchmark.group = title(Row(case=case))
    rounds, warm = (1, 1) if long else (CLOCK.rounds, 3)
    count = 1 if long else CLOCK.in_a_row(min(CLOCK.once(ready.run) for _ in range(2)))
    benchmark.pedantic(lambda: times.append(CLOCK.once(ready.run, count)), rounds=rounds, warmup_rounds=warm)
    dense += [] if long else CLOCK.times(ready.dense.run, share=0.5)
    estimate = None if ready.plan is None else CLOCK.median(ready.plan)
    estimate = None if estimate is None else estimate / case.layers
    row = ready.row(median(times[-rounds:]) / case.layers, median(dense), estimate=estimate)
    benchmark.extra_info.update(facts.fact(row))
    ROWS.append(row)
    return row
