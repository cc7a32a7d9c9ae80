"""Calls of several requests that a pipeline plans one by one and executes together."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import make
from helpers.stubs import Estimate
from sparseprefill import AttentionCall, Plan, Result, SparseMask
from sparseprefill.pipeline import SHARE
from sparseprefill.plan import Planned


class Together:
    """The reference, which writes down how many calls it was given at a time."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        self.asked.append(1)
        return sp.ReferenceExecutor().execute(call, plan)

    def execute_many(self, calls: Sequence[AttentionCall], plans: Sequence[Plan]) -> list[Result]:
        self.asked.append(len(calls))
        return [sp.ReferenceExecutor().execute(call, plan) for call, plan in zip(calls, plans, strict=True)]

    def accumulate(self, call: AttentionCall, plan: Plan) -> Any:
        raise NotImplementedError


class Watches:
    """An observer that keeps what it sees."""

    head_scope = "head"

    def __init__(self) -> None:
        self.seen: list[tuple[AttentionCall, Result, sp.Memory]] = []

    def observe(self, call: AttentionCall, plan: Plan, result: Result, memory: sp.Memory) -> None:
        self.seen.append((call, result, memory))


class Twice:
    """A corrector."""

    def correct(self, call: AttentionCall, plan: Plan, result: Result, memory: sp.Memory) -> Result:
        return evolve(result, out=result.out * 2)


def calls(count: int) -> list[AttentionCall]:
    return [make(length, seed=length) for length in range(20, 20 + count)]


def pipeline(executor: Any, **more: Any) -> sp.Pipeline:
    return sp.Pipeline(Estimate(lambda call, _: Plan(SparseMask.full(call, 8))), executor=executor, **more)


def test_results_are_those_of_each_call_alone() -> None:
    executor, watches, some = Together(), Watches(), calls(3)
    memories = [sp.Memory() for _ in some]
    made = pipeline(executor, observers=(watches,))
    results = made.run_many(some, memories)
    assert [3] == executor.asked
    assert [call for call, *_ in watches.seen] == some
    for result, (_, seen, memory), mine, call in zip(results, list(watches.seen), memories, some, strict=True):
        assert seen is result
        assert memory is mine
        assert torch.equal(made.run(call).out, result.out)


def test_so_many_wait_at_a_time() -> None:
    executor = Together()
    assert SHARE + 3 == len(pipeline(executor).run_many(calls(SHARE + 3)))
    assert [SHARE, 3] == executor.asked


def test_one_call_and_executors_without_the_method_run_as_ever() -> None:
    executor = Together()
    pipeline(executor).run_many(calls(1))
    assert [1] == executor.asked
    assert 2 == len(pipeline(sp.ReferenceExecutor()).run_many(calls(2)))
    assert [] == pipeline(executor).run_many([])


def test_what_is_corrected_runs_alone() -> None:
    executor = Together()
    made = pipeline(executor, corrector=Twice())
    results = made.run_many(calls(2))
    assert [1, 1] == executor.asked
    assert {"Twice"} == {result.corrected for result in results}


def test_so_does_what_may_hold_more_than_its_share() -> None:
    executor, (call, other) = Together(), calls(2)
    bound = pipeline(executor).bound(other)
    assert isinstance(pipeline(executor, workspace=SHARE * bound).begin(call), Planned)
    made = pipeline(executor, workspace=SHARE * bound - 1)
    assert isinstance(made.begin(other), Result)
    assert [1] == executor.asked
    assert isinstance(pipeline(executor, workspace=None).begin(other), Planned)


def test_calls_in_parts_run_alone() -> None:
    executor, (call, other) = Together(), calls(2)
    made = evolve(sp.build("bfla", tile=8), executor=executor)
    made = evolve(made, workspace=made.bound(call) // 2)
    first, _ = made.run_many([call, other])
    assert first.parts is not None
    assert 2 not in executor.asked


@pytest.mark.parametrize(
    ("calls", "memories", "name"), [(None, None, "calls"), ({"a": 1}, None, "calls"), ([], 3, "memories")]
)
def test_what_is_no_list_is_refused(calls: Any, memories: Any, name: str) -> None:
    with pytest.raises(sp.ParameterError, match=rf"{name} is .*: pass a list"):
        sp.build("dense").run_many(calls, memories)


def test_a_call_that_cannot_run_is_refused() -> None:
    class Never(Estimate):
        def unsupported(self, call: AttentionCall) -> str:
            return "never"

    made = sp.Pipeline(Never(lambda call, _: Plan(SparseMask.full(call, 8))))
    with pytest.raises(sp.UnsupportedCallError, match="never"):
        made.run_many(calls(2))
