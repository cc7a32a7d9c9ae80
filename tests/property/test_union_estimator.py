"""Laws of UnionEstimator, over drawn masks and carries."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import make
from helpers.stubs import Estimate, Refine
from sparseprefill.testing import attention, calls, masks

CALLS = calls(max_len=70, max_batch=2, max_heads=4, head_dims=(8,), dtypes=(torch.float64,))


@frozen(eq=False)
class Given:
    """An estimator with a plan made beforehand."""

    plan: sp.Plan

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        return self.plan


@st.composite
def plans(draw: st.DrawFn, call: sp.AttentionCall) -> sp.Plan:
    """Any mask, with or without a carry."""
    mask = draw(masks(call, diagonal=False))
    if draw(st.booleans()):
        return sp.Plan(mask)
    region = draw(masks(call, diagonal=False))
    state = sp.ReferenceExecutor().accumulate(call, sp.Plan(region))
    return sp.Plan(mask - region, sp.Carry(state, region))


def computed(union: sp.UnionEstimator, call: sp.AttentionCall) -> sp.Result:
    """What the union selects, computed; not by a pipeline, which takes no plan that leaves a row without a key."""
    return sp.AutoExecutor().execute(call, union.estimate(call, sp.Memory()))


def selected(plan: sp.Plan) -> torch.Tensor:
    mask = plan.mask.to_dense()
    return mask if plan.carry is None else mask | plan.carry.region.to_dense()


@given(call=CALLS, data=st.data())
def test_it_selects_what_any_part_selects_and_computes_it_once(call: sp.AttentionCall, data: st.DataObject) -> None:
    parts = [data.draw(plans(call)) for _ in range(data.draw(st.integers(1, 3)))]
    union = sp.UnionEstimator(*(Given(plan) for plan in parts))
    result = computed(union, call)
    expected = torch.stack([selected(plan) for plan in parts]).any(0)
    assert torch.equal(expected, selected(result.plan))
    assert any(plan.carry is not None for plan in parts) == (result.plan.carry is not None)
    if result.plan.carry is not None:
        assert not (result.plan.carry.region.to_dense() & result.plan.mask.to_dense()).any()
    out, lse = attention(call, expected)
    torch.testing.assert_close(out, result.out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, result.lse, rtol=1e-9, atol=1e-9)
    result.plan.mask.check()


@given(call=CALLS, data=st.data())
def test_the_order_of_the_parts_changes_no_number(call: sp.AttentionCall, data: st.DataObject) -> None:
    parts = [Given(data.draw(plans(call))) for _ in range(2)]
    one, other = (computed(sp.UnionEstimator(*order), call) for order in (parts, parts[::-1]))
    assert torch.equal(one.mask.to_dense(), other.mask.to_dense())
    torch.testing.assert_close(one.out, other.out, rtol=1e-12, atol=1e-12)


CALL = make(40)


def test_a_part_with_itself_is_the_part() -> None:
    part = sp.build("anchor-attention", theta=1.0, step=1, block=8, init_tokens=8)
    result = sp.Pipeline(sp.UnionEstimator(part, part)).run(CALL)
    assert torch.equal(part.run(CALL).mask.to_dense(), result.mask.to_dense())
    assert sp.UnionEstimator(part).estimate(CALL, sp.Memory()).carry is not None


def test_refiners_of_a_part_apply_to_the_part_alone() -> None:
    seen: list[float] = []

    def look(call: sp.AttentionCall, plan: sp.Plan, memory: sp.Memory) -> sp.Plan:
        seen.append(plan.mask.density)
        return plan

    part = sp.Pipeline(sp.build("streaming", sink=0, window=1, block=8).estimator, (Refine(look, 1),))
    union = sp.UnionEstimator(part, sp.build("dense"))
    assert 1.0 == sp.Pipeline(union).run(CALL).density
    assert [sp.Pipeline(part.estimator).run(CALL).density] == seen


def test_grain_is_the_least_common_multiple() -> None:
    assert 12 == sp.UnionEstimator(Estimate(grain=4), Estimate(grain=6)).grain
    assert sp.UnionEstimator(Estimate(grain=4), Estimate()).grain is None
    assert 12 == sp.UnionEstimator(sp.Pipeline(Estimate(grain=4), (Refine(grain=3),)), Estimate(grain=1)).grain


def test_objections_of_all_parts_are_told() -> None:
    union = sp.UnionEstimator(Estimate(objection="no sinks"), sp.Pipeline(Estimate(objection="no windows")))
    assert "Estimate: no sinks; Estimate: no windows" == union.unsupported(CALL)
    assert sp.UnionEstimator(Estimate()).unsupported(CALL) is None


def test_probes_and_notes_unite() -> None:
    heads = torch.tensor([[True, False]]), torch.tensor([[False, True]])
    mask = sp.SparseMask.full(CALL, 8)
    union = sp.UnionEstimator(
        Given(sp.Plan(mask)),
        Given(sp.Plan(mask, probe=heads[0], notes={"a": 1, "b": 1})),
        Given(sp.Plan(mask, probe=heads[1], notes={"b": 2, "c": 2})),
    )
    plan = union.estimate(CALL, sp.Memory())
    assert plan.probe is not None
    assert plan.probe.all()
    assert {"a": 1, "b": 1, "c": 2} == plan.notes


def test_a_model_is_asked_for_in_every_part() -> None:
    asked: list[Any] = []

    @frozen
    class Picky(Estimate):
        def check_model(self, model: Any) -> None:
            asked.append(model)

    model: Any = object()
    sp.UnionEstimator(Estimate(), Picky(), sp.Pipeline(Picky())).check_model(model)
    assert [model, model] == asked


def test_a_failing_part_is_named() -> None:
    def fail(*_: object) -> sp.Plan:
        raise ZeroDivisionError("oops")

    with pytest.raises(sp.StageError, match=r"Estimate.estimate\(\) raised ZeroDivisionError: oops"):
        sp.Pipeline(sp.UnionEstimator(Estimate(), Estimate(fail))).run(CALL)
