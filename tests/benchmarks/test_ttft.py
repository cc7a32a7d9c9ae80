"""Time to the first token of a model of Llama-3-8B's shape, with each method next to the stock model with cuDNN."""

from __future__ import annotations

import pytest
import torch
from attrs import asdict
from pytest_benchmark.fixture import BenchmarkFixture

from lab.bench import tables
from lab.bench.shape import ModelShape
from lab.bench.ttft import Prefill, tiles
from sparseprefill import default_registry

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
LENGTHS = (32768, 65536, 131072)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_first_token(benchmark: BenchmarkFixture, tokens: int) -> None:
    registry = default_registry()
    methods = [(name, registry.build(name, **registry.get(name).stand_in)) for name in tables.names(registry)]
    prefill = Prefill(shape=ModelShape(), device=torch.device("cuda"), tokens=tokens)
    rows = benchmark.pedantic(lambda: prefill.run([*methods, ("tiles 0.1", tiles(0.1))]), rounds=1)
    benchmark.extra_info.update({row.name: {**asdict(row), "speedup": row.speedup} for row in rows})
    assert [row.error for row in rows if row.error] == []
