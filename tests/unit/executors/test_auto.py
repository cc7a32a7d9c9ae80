"""Which executor a device gets, and what the bare call of a pipeline is taken for."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pytest
import torch

import sparseprefill as sp
from helpers.build import make
from sparseprefill.executors.auto import CPU
from sparseprefill.executors.reference import REFERENCE


@pytest.mark.parametrize(("device", "executor"), [("cpu", CPU), ("meta", REFERENCE)])
def test_a_cpu_gets_its_own_executor_and_what_nobody_knows_the_reference(device: str, executor: object) -> None:
    q = torch.empty(1, 2, 8, 8, device=device)
    assert sp.AutoExecutor().choose(sp.AttentionCall(q, q, q)) is executor


def test_a_call_of_tensors_is_of_layer_0() -> None:
    call, layers = make(8), []

    class Watches:
        def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> None:
            layers.append(call.layer)

    pipeline = sp.build("dense", block=4)
    sp.Pipeline(pipeline.estimator, observers=(Watches(),))(call.q, call.k, call.v)
    assert [0] == layers


def test_every_call_needs_its_plan() -> None:
    calls = [make(8), make(8)]
    plans = [sp.Plan(sp.SparseMask.full(call, 4)) for call in calls]
    assert 2 == len(sp.AutoExecutor().execute_many(calls, plans))
    with pytest.raises(ValueError, match="shorter"):
        sp.AutoExecutor().execute_many(calls, plans[:1])
