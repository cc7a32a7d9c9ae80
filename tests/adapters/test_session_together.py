"""Calls of one step in a session: executed together, recorded and failing each by itself."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.session.session import APART, Fallback, Prefill, Session

import sparseprefill as sp
from helpers.build import make
from helpers.stubs import Estimate


class Together:
    """The reference. broken: rows of calls that fail; all: whatever is asked for together fails."""

    def __init__(self, broken: int = 0, *, all_of_them: bool = False) -> None:
        self.broken, self.all, self.asked = broken, all_of_them, list[int]()

    def execute(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
        if call.q.shape[2] == self.broken:
            raise ZeroDivisionError("a bug")
        return sp.ReferenceExecutor().execute(call, plan)

    def execute_many(self, calls: Sequence[sp.AttentionCall], plans: Sequence[sp.Plan]) -> list[sp.Result]:
        self.asked.append(len(calls))
        if self.all:
            raise ValueError("no launch")
        return [self.execute(call, plan) for call, plan in zip(calls, plans, strict=True)]

    def accumulate(self, call: sp.AttentionCall, plan: sp.Plan) -> Any:
        raise NotImplementedError


def pipeline(executor: Any, broken: int = 0) -> sp.Pipeline:
    def estimate(call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        if call.q.shape[2] == broken:
            raise ZeroDivisionError("a bug")
        return sp.Plan(sp.SparseMask.full(call, 8))

    return sp.Pipeline(Estimate(estimate), executor=executor)


def asked(*lengths: int, **fields: Any) -> list[tuple[sp.AttentionCall, Prefill]]:
    return [(attrs.evolve(make(n, seed=n), **fields), Prefill()) for n in lengths]


def session(made: sp.Pipeline, **more: Any) -> Session:
    return Session(made, min_query=2, tail=0, **more)


def test_every_call_is_counted() -> None:
    executor, seen = Together(), list[sp.AttentionCall]()
    mine = session(pipeline(executor), observe=lambda call, _: seen.append(call))
    some = asked(20, 21, 22)
    found = mine.run_many(some)
    assert [3] == executor.asked
    assert [call for call, _ in some] == seen
    for (call, _), result in zip(some, found, strict=True):
        assert isinstance(result, sp.Result)
        assert torch.equal(session(pipeline(executor)).run(call, Prefill()).out, result.out)  # type: ignore[union-attr]
    (layer,) = mine.report("", "").layers
    assert 3 == layer.sparse_calls


def test_a_failed_estimate_is_that_requests_alone() -> None:
    executor = Together()
    first, second, third = session(pipeline(executor, broken=21)).run_many(asked(20, 21, 22))
    assert isinstance(first, sp.Result)
    assert isinstance(second, sp.StageError)
    assert isinstance(third, sp.Result)
    assert [2] == executor.asked


def test_so_is_a_failed_execution_and_a_note_says_that_the_others_ran_apart() -> None:
    mine = session(pipeline(Together(broken=21)))
    first, second, third = mine.run_many(asked(20, 21, 22))
    assert isinstance(first, sp.Result)
    assert isinstance(second, sp.StageError)
    assert isinstance(third, sp.Result)
    report = mine.report("", "")
    assert {APART.format(error="StageError"): 1} == report.notes
    assert 2 == report.layers[0].sparse_calls


def test_what_fails_only_together_is_noted() -> None:
    mine = session(pipeline(Together(all_of_them=True)))
    assert all(isinstance(one, sp.Result) for one in mine.run_many(asked(20, 21)))
    assert {APART.format(error="StageError"): 1} == mine.report("", "").notes


def test_layers_windows_and_gates_are_as_of_one_call() -> None:
    executor = Together()
    (other,) = session(pipeline(executor), layers=[3]).run_many(asked(20))
    assert isinstance(other, Fallback)
    window, _ = session(pipeline(executor)).run_many([*asked(20, window=4), *asked(21)])
    assert isinstance(window, sp.Result)
    assert not executor.asked, "one alone, and one that the method never sees"


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_the_method_cannot_run(strict: bool) -> None:
    class Picky(Together):
        def unsupported(self, call: sp.AttentionCall) -> str | None:
            return "too long" if call.q.shape[2] > 20 else None

    mine = session(pipeline(Picky()), strict=strict)
    first, second = mine.run_many(asked(20, 21))
    assert isinstance(first, sp.Result)
    assert isinstance(second, sp.UnsupportedCallError if strict else Fallback)
