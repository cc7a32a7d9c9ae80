"""Which executor a device gets, what the bare call of a pipeline is taken for, and plans of other calls."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import int32, make
from sparseprefill.executors.auto import CPU
from sparseprefill.executors.reference import REFERENCE
from sparseprefill.executors.triton import TritonExecutor


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


CALL = make(20, 27, batch=2, heads=4, kv_heads=2, starts=int32(0, 3), lengths=int32(27, 20), window=12)
OTHERS: dict[str, dict[str, Any]] = {
    "starts": {"starts": int32(0, 4)},
    "no starts": {"starts": None},
    "lengths": {"lengths": int32(27, 19)},
    "no lengths": {"lengths": None},
    "window": {"window": 11},
    "offset": {"q_offset": 6},
    "rows": {"q": CALL.q[:, :, 1:]},
    "heads": {"q": CALL.q[:, :2]},
}
VERBS: dict[str, Callable[..., Any]] = {
    "execute": lambda one, call, plan: one.execute(call, plan),
    "accumulate": lambda one, call, plan: one.accumulate(call, plan),
    "execute_into": lambda one, call, plan: one.execute_into(call, plan, CALL.q, CALL.q[..., 0]),
    "execute_many": lambda one, call, plan: one.execute_many([call, CALL], [plan, sp.Plan(sp.SparseMask.full(CALL))]),
    "execute_many_into": lambda one, call, plan: one.execute_many_into(
        [call, CALL], [plan, sp.Plan(sp.SparseMask.full(CALL))], [CALL.q, CALL.q]
    ),
}
MANY = (sp.AutoExecutor(), TritonExecutor())
RUNS = [(verb, one) for verb in VERBS for one in (CPU, REFERENCE, *MANY) if "many" not in verb or one in MANY]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(("verb", "executor"), RUNS, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_a_plan_of_another_call_is_refused(verb: str, executor: Any, other: str) -> None:
    theirs = evolve(CALL, **OTHERS[other])
    for plan in (sp.Plan(sp.SparseMask.full(theirs)), sp.Plan(lambda: sp.SparseMask.full(theirs))):
        words = r"plan has a mask for \[B=2.*the call is \[B=2.*it must be made for this call"
        with pytest.raises(sp.MaskError, match=words):
            VERBS[verb](executor, CALL, plan)


@pytest.mark.parametrize("executor", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_a_carry_of_another_call_is_refused_behind_a_mask_made_later(executor: Any) -> None:
    theirs = evolve(CALL, starts=None)
    carry = sp.Carry(CPU.accumulate(theirs, sp.Plan(sp.SparseMask.full(theirs))), sp.SparseMask.full(theirs))
    with pytest.raises(sp.MaskError, match=r"Plan\.carry covers"):
        executor.execute(CALL, sp.Plan(lambda: sp.SparseMask.empty(CALL, 16), carry))


def test_every_call_needs_its_plan() -> None:
    calls = [make(8), make(8)]
    plans = [sp.Plan(sp.SparseMask.full(call, 4)) for call in calls]
    assert 2 == len(sp.AutoExecutor().execute_many(calls, plans))
    with pytest.raises(ValueError, match="shorter"):
        sp.AutoExecutor().execute_many(calls, plans[:1])


def test_outputs_of_several_calls_are_left_in_the_callers_tensors() -> None:
    calls = [make(8), make(8)]
    plans, outs = [sp.Plan(sp.SparseMask.full(call, 4)) for call in calls], [torch.zeros_like(call.q) for call in calls]
    found = sp.AutoExecutor().execute_many_into(calls, plans, outs)
    for one, alone, out in zip(found, sp.AutoExecutor().execute_many(calls, plans), outs, strict=True):
        assert one.out is out
        assert torch.equal(out, alone.out)


def test_no_calls_need_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TritonExecutor.__module__, None)
    assert [] == sp.AutoExecutor().execute_many([], [])


@pytest.mark.parametrize("kind", [sp.AutoExecutor, TritonExecutor])
def test_options_are_given_by_name(kind: Any) -> None:
    with pytest.raises(TypeError):
        kind("int8")
    with pytest.raises(TypeError):
        kind(0.1, precision="int8")
