"""A session's report: which kernels served, and that a reason is logged once."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import logging
import sys
import threading

import pytest
from attrs import evolve, frozen
from sparseprefill.adapters.session.session import Prefill, Session

import sparseprefill as sp
from helpers.build import make
from helpers.tables import from_length
from sparseprefill.plan import Kernel, SoftmaxState

CALL = make(96, heads=4, kv_heads=2)
METHOD = sp.build("streaming", sink=16, window=16, block=16)


@frozen
class Named:
    """The reference, under other kernels' names; none: an executor that does not tell."""

    kernels: tuple[Kernel, ...]

    def execute(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
        return evolve(sp.ReferenceExecutor().execute(call, plan), kernels=self.kernels)

    def accumulate(self, call: sp.AttentionCall, plan: sp.Plan) -> SoftmaxState:
        return sp.ReferenceExecutor().accumulate(call, plan)


def test_calls_are_counted_by_kernel() -> None:
    session = Session(METHOD)
    for _ in range(3):
        session.run(CALL, Prefill())
    session.run(evolve(CALL, window=24), Prefill())
    report = session.report("none", "none")
    assert {"cpu": 4} == report.kernels
    assert "kernel: cpu, 4 calls" in str(report)


@pytest.mark.parametrize(
    ("kernels", "counted"),
    [
        ((Kernel("hopper"),), {"hopper": 2}),
        ((Kernel("portable", "tiles of 64 x 64"),), {"portable (tiles of 64 x 64)": 2}),
        ((Kernel("hopper"), Kernel("portable", "a softcap")), {"hopper": 2, "portable (a softcap)": 2}),
        ((), {"Named": 2}),
    ],
)
def test_the_executor_says_what_it_ran(kernels: tuple[Kernel, ...], counted: dict[str, int]) -> None:
    session = Session(evolve(METHOD, executor=Named(kernels)))
    for _ in range(2):
        session.run(CALL, Prefill())
    assert counted == session.report("none", "none").kernels


def test_a_call_in_parts_counts_once_for_each_kernel() -> None:
    result = evolve(METHOD, workspace=1).run(CALL)
    assert result.parts is not None
    assert result.parts.count > 1
    assert (Kernel("cpu"),) == result.kernels


def test_dense_attention_by_torch_has_its_name() -> None:
    result = sp.gated(METHOD, from_length(1 << 20, heads=4, kv_heads=2, head_dim=CALL.q.shape[-1])).run(CALL)
    assert result.dense
    assert (Kernel("torch"),) == result.kernels


def test_threads_that_fall_back_together_are_warned_once_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    reasons = [f"reason {chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(150)]  # numbers make no other reason
    session, jobs = Session(METHOD), 6
    start = threading.Barrier(jobs)

    def decline(layer: int) -> None:
        for reason in reasons:
            start.wait()
            session.decline(layer, reason, (1, 4, 4))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with caplog.at_level(logging.WARNING, "sparseprefill"):
            threads = [threading.Thread(target=decline, args=(layer,)) for layer in range(jobs)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(reasons) == len(caplog.records)
    assert dict.fromkeys(reasons, jobs) == session.report("none", "none").fallbacks
