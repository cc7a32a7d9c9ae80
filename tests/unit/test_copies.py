"""What a worker process sends back, and what users copy: pickle and deepcopy keep type, message and values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import make
from sparseprefill import errors
from sparseprefill.plan import Carry, Parts, Plan, Result, SoftmaxState

Copy = Callable[[Any], Any]
COPIES: dict[str, Copy] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "oldest pickle": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "deepcopy": copy.deepcopy,
}
ERRORS = [
    errors.InvalidCallError("window", 0, "pass a positive number of keys, or None"),
    errors.UnsupportedCallError(["softcap", "sinks"]),
    *(
        kind("what went wrong")
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.SparsePrefillError)
        and kind not in (errors.InvalidCallError, errors.UnsupportedCallError)
    ),
]
copied = pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)


class Foreign(errors.UnsupportedCallError):
    """A plugin's own error, made from something else than its message."""

    def __init__(self, stage: str, *, code: int) -> None:
        super().__init__([stage, "no"])
        self.code = code


def fail() -> None:
    """A job whose call is wrong."""
    q = torch.zeros(1, 1, 4, 8)
    sp.AttentionCall(q, q, q, window=0)


@copied
@pytest.mark.parametrize("error", [*ERRORS, Foreign("mine", code=3)], ids=lambda error: type(error).__name__)
def test_errors_come_back_as_they_were(error: Exception, again: Copy) -> None:
    error.add_note("seen in layer 3")
    found = again(error)
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))


def test_an_error_crosses_a_worker_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        failed = pool.submit(fail).exception(timeout=60)
    assert isinstance(failed, errors.InvalidCallError)
    assert "AttentionCall.window is 0" in str(failed)
    assert failed.field == "window"


@copied
def test_results_and_plans_are_copied_with_their_masks(again: Copy) -> None:
    call = make(40)
    methods: dict[str, dict[str, Any]] = {"xattention": {"stride": 4, "block": 16, "threshold": 0.5}, "dense": {}}
    for name, parameters in methods.items():
        result = sp.default_registry().get(name).pipeline(**parameters).run(call)
        found = again(result)
        assert isinstance(found, Result)
        assert torch.equal(found.out, result.out)
        assert torch.equal(found.mask.to_dense(), result.mask.to_dense())
        assert found.plan.notes == {}
        assert found.density == result.density


@copied
def test_a_plan_whose_mask_is_a_function_is_copied(again: Copy) -> None:
    call = make(40)
    found = again(Plan(partial(sp.SparseMask.full, call, 16)))
    assert torch.equal(found.mask.to_dense(), sp.SparseMask.full(call, 16).to_dense())


@copied
def test_a_carry_and_the_record_of_parts_are_copied(again: Copy) -> None:
    call = make(40)
    first = sp.SparseMask.from_rules(call, (16, 16), sink=1)
    state = sp.ReferenceExecutor().accumulate(call, Plan(first))
    plan = Plan(sp.SparseMask.full(call, 16) - first, Carry(state, first))
    found = again(plan)
    assert isinstance(found.carry.state, SoftmaxState)
    executor = sp.ReferenceExecutor()
    assert torch.equal(executor.execute(call, found).out, executor.execute(call, plan).out)
    cut = evolve(sp.build("streaming", sink=8, window=16, block=8), workspace=1).run(make(64))
    assert isinstance(cut.parts, Parts)
    assert again(cut).density == cut.density
    assert again(cut.parts).count == cut.parts.count


@copied
def test_methods_are_copied(again: Copy) -> None:
    for name in sp.methods():
        method = sp.default_registry().get(name)
        found = again(method)
        assert found == method
        assert found.pipeline(**method.small).name
