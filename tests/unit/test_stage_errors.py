"""Stages and methods that raise or return nonsense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from helpers.build import make
from helpers.registry_plugins import method
from helpers.stubs import Estimate, Observe, Refine
from sparseprefill import Corrector
from sparseprefill.errors import MaskError, ParameterError, StageError, frameless
from sparseprefill.mask.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Carry, Plan, SoftmaxState

CALL = make(20)


def fail(*_: Any) -> Any:
    raise KeyError("lost")


class Broken:
    def execute(self, call: Any, plan: Any) -> Any:
        return call.q

    def accumulate(self, call: Any, plan: Any) -> Any: ...


@frozen
class Correct:
    answer: Any

    def correct(self, call: Any, plan: Any, result: Any, memory: Any) -> Any:
        return self.answer(call, plan, result, memory)


def other_lse(call: Any, plan: Any, result: Any, memory: Any) -> Any:
    return evolve(result, lse=result.lse + 1)


def half(call: Any, plan: Any, result: Any, memory: Any) -> Any:
    return evolve(result, out=result.out.half())


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (Pipeline(Estimate(fail)), r"Estimate\.estimate\(\) raised KeyError: 'lost'"),
        (Pipeline(Estimate(lambda *_: None)), r"Estimate\.estimate\(\) returned NoneType: it must return Plan"),
        (Pipeline(Estimate(lambda call, _: SparseMask.full(call))), r"returned SparseMask: it must return Plan"),
        (Pipeline(Estimate(), (Refine(fail),)), r"Refine\.refine\(\) raised KeyError"),
        (Pipeline(Estimate(), (Refine(lambda *_: 3),)), r"Refine\.refine\(\) returned int: it must return Plan"),
        (Pipeline(Estimate(), (), Broken()), r"Broken\.execute\(\) returned Tensor: it must return Result"),
        (Pipeline(Estimate(), corrector=Correct(fail)), r"Correct\.correct\(\) raised KeyError"),
        (Pipeline(Estimate(), corrector=Correct(lambda *_: 1)), r"correct\(\) returned int: it must return Result"),
        (Pipeline(Estimate(), corrector=Correct(other_lse)), r"correct\(\) returned a Result of another lse"),
        (Pipeline(Estimate(), corrector=Correct(half)), r"correct\(\) returned a Result whose out is torch.float16"),
        (Pipeline(Estimate(), observers=(Observe(fail),)), r"Observe\.observe\(\) raised KeyError"),
        (Pipeline(Estimate(), observers=(Observe(lambda *_: 1),)), r"observe\(\) returned int: .*NoneType"),
    ],
)
def test_stage_that_misbehaves_is_named(pipeline: Pipeline, said: str) -> None:
    with pytest.raises(StageError, match=said):
        pipeline.run(CALL)


@pytest.mark.parametrize(
    "run", [lambda: Pipeline(Estimate(fail)).run(CALL), lambda: method("mine", build=fail).pipeline()]
)
def test_original_error_is_the_cause(run: Callable[[], object]) -> None:
    with pytest.raises(StageError) as caught:
        run()
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("other", [make(19), make(10, 20), make(20, heads=4), make(20, batch=2), make(20, window=3)])
def test_mask_for_another_shape(other: Any) -> None:
    pipeline = Pipeline(Estimate(lambda *_: Plan(SparseMask.full(other))))
    with pytest.raises(
        MaskError, match=r"Estimate\.estimate\(\): it returned a mask for .*; the call is \[B=1, Hq=2, Nq=20"
    ):
        pipeline.run(CALL)


def test_refiner_and_carry_with_a_mask_for_another_shape() -> None:
    other = SparseMask.full(make(19))
    with pytest.raises(MaskError, match=r"Refine\.refine\(\): it returned a mask"):
        Pipeline(Estimate(), (Refine(lambda _, plan, __: evolve(plan, mask=other)),)).run(CALL)
    state = SoftmaxState.empty((1, 2, 20), 8, torch.float32, torch.device("cpu"))
    with pytest.raises(MaskError, match=r"Plan.carry covers \[B=1, Hq=2, Nq=19.*, the mask is for \[B=1, Hq=2, Nq=20"):
        Pipeline(Estimate(), (Refine(lambda _, plan, __: evolve(plan, carry=Carry(state, other))),)).run(CALL)


def test_whether_an_object_is_a_corrector_can_be_asked() -> None:
    assert isinstance(Correct(fail), Corrector)
    assert not isinstance(Broken(), Corrector)


def failing() -> None:
    """Raises an error from one while another is handled."""
    try:
        raise ValueError("handled")
    except ValueError:
        raise StageError("third") from raised(KeyError("first"))


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as found:
        raise error
    return found.value


def test_an_error_that_is_kept_holds_no_frames() -> None:
    """Nor does one that it was raised from, or while which it was."""
    with pytest.raises(StageError) as caught:
        failing()
    found = frameless(caught.value)
    chain = (found, found.__cause__, found.__context__)
    assert [type(one) for one in chain] == [StageError, KeyError, ValueError]
    assert [one and one.__traceback__ for one in chain] == [None] * 3


@pytest.mark.parametrize("field", ["estimator", "refiners", "executor", "observers"])
def test_a_pipeline_is_no_stage(field: str) -> None:
    """It answers to much of what a stage is asked."""
    inner = Pipeline(Estimate(lambda call, memory: Plan(SparseMask.full(call, 16))))
    given: dict[str, Any] = {
        "estimator": inner.estimator,
        field: inner if field in ("estimator", "executor") else (inner,),
    }
    with pytest.raises(ParameterError, match="a Pipeline stands where a stage of a Pipeline belongs: pass one of its"):
        Pipeline(**given)
