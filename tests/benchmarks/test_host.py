"""What the vLLM adapter costs the host: a step's plan, and recording a layer's call. In processor time; on any machine.

Rows that decode wait for a step's plan, so its cost must not grow with them. Times are reported and never asserted:
what must not grow is counted, in calls of functions.
"""

from __future__ import annotations

import gc
import sys
import time
import timeit
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.session import Prefill, Session
from sparseprefill.adapters.vllm.plan import plan

import sparseprefill as sp
from helpers.vllm_runners import Common, RunnerV1, RunnerV2, runtime, stock
from sparseprefill.call import AttentionCall
from sparseprefill.pipeline import Pipeline

pytestmark = pytest.mark.benchmark(timer=time.process_time, warmup=False)
DECODING, CHUNK, LAYERS = 255, 64, 80


class Steps:
    """Steps of `decoding` rows that decode, and behind them a request whose prompt comes in chunks, if `prompt`."""

    def __init__(self, runner: type[RunnerV1 | RunnerV2], *, prompt: bool, decoding: int = DECODING) -> None:
        self.decoding = decoding
        self.names = [f"cmpl-{i:032x}-0" for i in range(decoding + 1)]
        self.mine, self.prompt, self.number = runtime(), prompt, 0
        self.host = runner(self.mine, *self.names)
        if isinstance(self.host, RunnerV2):
            self.host.req_states.prompt_len[:] = 1 << 30
        else:
            told: Any = SimpleNamespace(num_prompt_tokens=1 << 30, sampling_params=SimpleNamespace(extra_args=None))
            self.host.requests = dict.fromkeys(self.names, told)

    def next(self) -> Common:
        """The metadata of the next step."""
        self.number += 1
        queries = [1] * self.decoding + [CHUNK if self.prompt else 1]
        lengths = [500 + i + self.number for i in range(self.decoding)] + [CHUNK * self.number if self.prompt else 900]
        return self.host.batch(queries, lengths, [False] * self.decoding + [self.prompt], *self.names)

    def run(self, batch: Common) -> int:
        """Plan a step and make the metadata of the rows that stay with the host; how many parts there are."""
        parts = list(plan(self.mine, batch, stock) or ())
        for part in parts:
            if part.row is None:
                part.metadata()
        return len(parts)


@pytest.mark.parametrize("prompt", [True, False], ids=["one prefill", "decoding alone"])
@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2], ids=["runner V1", "runner V2"])
def test_plan(benchmark: BenchmarkFixture, runner: type[RunnerV1 | RunnerV2], prompt: bool) -> None:
    benchmark.group = f"plan of a step: {DECODING} rows that decode, and one more"
    steps = Steps(runner, prompt=prompt)
    found = benchmark.pedantic(steps.run, setup=lambda: ((steps.next(),), {}), rounds=300, warmup_rounds=5)
    assert found == (2 if prompt else 0)


def test_call(benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.group = f"record of a layer's call, of {LAYERS} layers"
    call = AttentionCall(*(torch.zeros(1, 1, 8, 8) for _ in range(3)))
    result = sp.build("streaming").run(call)
    monkeypatch.setattr(Pipeline, "run", lambda *_: result)
    one, many = session(1), session(LAYERS)
    prefill, calls = Prefill(), 200

    def run(session: Session) -> None:
        for _ in range(calls):
            session.run(call, prefill)

    benchmark.pedantic(run, args=(many,), rounds=50, warmup_rounds=1)
    alone = min(timeit.repeat(lambda: run(one), timer=time.process_time, number=1, repeat=50))
    more = (least(benchmark) - alone) / calls
    benchmark.extra_info["seconds_more_than_with_one_layer"] = more


@pytest.mark.parametrize("prompt", [True, False], ids=["one prefill", "decoding alone"])
@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2], ids=["runner V1", "runner V2"])
def test_a_plan_takes_as_many_steps_for_many_rows(runner: type[RunnerV1 | RunnerV2], prompt: bool) -> None:
    few, many = (Steps(runner, prompt=prompt, decoding=rows) for rows in (15, DECODING))
    counts = []
    for steps in (few, many):
        steps.run(steps.next())
        batch = steps.next()
        counts.append(called(partial(steps.run, batch)))
    assert 0 < counts[1] <= counts[0] + 2


def test_a_record_takes_as_many_steps_for_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    call = AttentionCall(*(torch.zeros(1, 1, 8, 8) for _ in range(3)))
    result = sp.build("streaming").run(call)
    monkeypatch.setattr(Pipeline, "run", lambda *_: result)
    counts = []
    for layers in (1, LAYERS):
        made, prefill = session(layers), Prefill()
        made.run(call, prefill)
        counts.append(called(partial(made.run, call, prefill)))
    assert 0 < counts[0] == counts[1]


def called(function: Callable[[], object]) -> int:
    """How many functions it calls, Python's and C's; not those that others have the garbage collector call."""
    number, collects = 0, gc.isenabled()

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return number


def least(benchmark: BenchmarkFixture) -> float:
    """Seconds of the fastest round: what others do on the machine can only add. 0 with --benchmark-disable."""
    return 0.0 if benchmark.stats is None else float(min(benchmark.stats.stats.data))


def session(layers: int) -> Session:
    """One whose layers have all been called, with recall unmeasured."""
    made = Session(sp.build("streaming"), HostOptions(recall_every=0))
    made.expect(range(layers))
    return made
