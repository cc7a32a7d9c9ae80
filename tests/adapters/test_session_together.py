"""Calls of one step in a session: executed together, recorded and failing each by itself."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.session import APART, UNREAD, Fallback, Prefill, Session

import sparseprefill as sp
from helpers import sessions
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


def asked(*lengths: int, read: int | None = None, **fields: Any) -> list[tuple[sp.AttentionCall, Prefill, int | None]]:
    return [(attrs.evolve(make(n, seed=n), **fields), Prefill(), read) for n in lengths]


def session(made: sp.Pipeline, **more: Any) -> Session:
    return sessions.session(made, min_query=2, tail=0, **more)


def test_every_call_is_counted() -> None:
    executor, seen = Together(), list[sp.AttentionCall]()
    mine = session(pipeline(executor), observe=lambda call, _: seen.append(call))
    some = asked(20, 21, 22)
    found = mine.run_many(some)
    assert [3] == executor.asked
    assert [call for call, *_ in some] == seen
    for (call, *_), result in zip(some, found, strict=True):
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


def test_rows_that_nobody_reads_are_left_out_of_a_step() -> None:
    """Of one call the last row is read, of the others all; what is read is as if everything were."""
    executor, seen = Together(), list[tuple[int, float]]()

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        seen.append((call.q.shape[2], result.density))

    mine = Session(pipeline(executor), HostOptions(min_query=2), observe=observe)
    part, *whole = mine.run_many([*asked(300, read=1), *asked(20, 21)])
    assert isinstance(part, sp.Result)
    assert [2] == executor.asked
    assert [(44, pytest.approx(part.density)), (20, 1.0), (21, 1.0)] == seen
    alone = session(pipeline(executor)).run(make(300, seed=300), Prefill())
    assert isinstance(alone, sp.Result)
    torch.testing.assert_close(alone.out[:, :, -1], part.out[:, :, -1])
    assert not part.out[:, :, :256].any()
    assert [(300,), (20,), (21,)] == [one.out.shape[2:3] for one in (part, *whole) if isinstance(one, sp.Result)]
    assert {UNREAD.format(layer=0): 1} == mine.report("", "").notes
