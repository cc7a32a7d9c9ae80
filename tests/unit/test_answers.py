"""What plans, pipelines and routes answer when they are asked: bounds, scopes, grains, objections, lists."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest
import torch
from attrs import evolve, frozen

import sparseprefill as sp
from helpers.build import make
from helpers.stubs import Estimate, Observe, Refine
from sparseprefill.errors import ParameterError, UnsupportedCallError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.mask.lists import IndexLists
from sparseprefill.plan import Carry, Parts, Plan, Result
from sparseprefill.route import Choice, Route
from sparseprefill.stages import common_grain, missing, widest_scope

CALL = make(24)
FULL = sp.SparseMask.full(CALL, 8)
SINK, BAND = sp.SparseMask.from_rules(CALL, 8, sink=1), sp.SparseMask.from_rules(CALL, 8, band=0)


def carry_of(mask: sp.SparseMask) -> Carry:
    return Carry(sp.ReferenceExecutor().accumulate(CALL, Plan(mask)), mask)


def test_what_a_plan_computes_as_lists() -> None:
    plan = Plan(SINK - BAND, carry_of(BAND))
    region, mask = plan.computed()
    assert torch.equal(BAND.to_dense(), region.to_dense())
    assert torch.equal(plan.mask.to_dense(), mask.to_dense())
    assert {IndexLists} == {type(region._tiles), type(mask._tiles)}
    assert 1 == len(Plan(SINK).computed())
    assert (8, 8) == Plan(SINK).grid()
    assert (32, 32) == Plan(SINK).grid(32)


def test_what_is_carried_is_not_computed_again() -> None:
    carry = carry_of(BAND)
    wide = Plan(sp.SparseMask.empty(CALL, 8), carry).widen(FULL)
    assert torch.equal(FULL.to_dense() & ~BAND.to_dense(), wide.mask.to_dense())
    assert wide.carry is carry
    assert torch.equal(SINK.to_dense() | BAND.to_dense(), Plan(SINK).widen(BAND).mask.to_dense())
    result = Result(CALL.q, CALL.q[..., 0], wide)
    assert torch.equal(FULL.to_dense(), result.mask.to_dense())
    assert 1.0 == result.density


def test_a_mask_made_when_it_is_read() -> None:
    made: list[sp.SparseMask] = []

    def make_it() -> sp.SparseMask:
        made.append(FULL)
        return FULL

    plan = Plan(make_it)
    assert [] == made
    assert plan.mask is plan.mask is FULL
    assert [FULL] == made


def test_results_into_other_tensors() -> None:
    result = sp.build("dense").run(CALL)
    out, lse = torch.zeros_like(result.out), torch.zeros_like(result.lse)
    again = result.into(out, lse)
    assert (again.out is out, again.lse is lse, again.plan is result.plan) == (True, True, True)
    assert torch.equal(result.out, out)
    assert torch.equal(result.lse, lse)
    parts = Parts(CALL.geometry, 2, torch.tensor([[100, 50]]))
    assert 150 / 600 == Result(out, lse, Plan(FULL), parts=parts).density
    assert ("", None, None) == (result.dense, result.parts, result.probe)


@frozen
class Asked(Estimate):
    """A stage of every kind, which answers everything."""

    bytes_held: int = 0
    head_scope: str | None = None
    relies_on: tuple[Any, ...] = ()

    def workspace(self, call: sp.AttentionCall) -> int:
        return self.bytes_held

    def refine(self, call: Any, plan: Any, memory: Any) -> Any:
        return plan

    def observe(self, call: Any, plan: Any, result: Any, memory: Any) -> None: ...

    def execute(self, call: Any, plan: Any) -> Any:
        return sp.ReferenceExecutor().execute(call, plan)

    def accumulate(self, call: Any, plan: Any) -> Any:
        return sp.ReferenceExecutor().accumulate(call, plan)


def asked(estimator: int, refiners: tuple[int, ...], executor: int, observers: tuple[int, ...]) -> sp.Pipeline:
    def stage(size: int) -> Any:
        return Asked(bytes_held=size)

    return sp.Pipeline(stage(estimator), tuple(map(stage, refiners)), stage(executor), tuple(map(stage, observers)))


@pytest.mark.parametrize(
    ("pipeline", "plan", "whole"),
    [
        (asked(5, (), 7, ()), 5, 12),
        (asked(5, (2, 9, 3), 7, ()), 14, 14),
        (asked(5, (2, 9, 3), 70, (8,)), 14, 75),
        (asked(5, (2,), 7, (80, 8)), 7, 85),
    ],
)
def test_bounds_are_the_estimator_and_the_largest_of_the_rest(pipeline: sp.Pipeline, plan: int, whole: int) -> None:
    assert (plan, whole) == (pipeline.plan_bound(CALL), pipeline.bound(CALL))


def test_objections_of_all_of_the_plan_and_of_the_executor() -> None:
    made = sp.Pipeline(
        Asked(objection="a"), (Asked(objection="b"), Asked(objection="a"), Refine()), Asked(objection="c"),
        (Asked(objection="d"), Observe()),
    )  # fmt: skip
    assert tuple(f"Asked: {one}" for one in "abcd") == made.unsupported(CALL)
    assert ("Asked: a", "Asked: b") == made.unsupported_plan(CALL)
    route = Route.of(made)
    assert made.unsupported(CALL) == route.unsupported(CALL)
    assert () == sp.Pipeline(Estimate()).unsupported(CALL)


@pytest.mark.parametrize(
    ("grains", "expected"), [((4, 6), 12), ((4,), 4), ((4, None), None), ((None,), None), ((), 1), ((1, 1), 1)]
)
def test_common_grains(grains: tuple[int | None, ...], expected: int | None) -> None:
    assert expected == common_grain(grains)


def test_widest_scopes() -> None:
    for found in product(("head", "group", None), repeat=2):
        expected = None if None in found else "group" if "group" in found else "head"
        assert expected == widest_scope(found)
    assert "head" == widest_scope(())
    scopes = [Asked(head_scope="head"), Asked(head_scope="group")]
    assert "group" == sp.Pipeline(scopes[0], (scopes[1],)).head_scope
    assert "head" == sp.Pipeline(scopes[0], (scopes[0],), observers=(scopes[0],)).head_scope
    assert "group" == sp.Pipeline(scopes[0], observers=(scopes[1],)).head_scope
    assert sp.Pipeline(scopes[0], observers=(Observe(),)).head_scope is None


def test_a_scope_needs_the_observers_that_stages_rely_on() -> None:
    told, other = Asked(head_scope="head"), Asked(head_scope="group")
    relies = Asked(head_scope="head", relies_on=(told,))
    for observers, expected in (((), None), ((other,), None), ((told,), "head"), ((other, told), "group")):
        for made in (sp.Pipeline(relies), sp.Pipeline(told, (relies,)), sp.Pipeline(sp.UnionEstimator(relies, told))):
            assert expected == evolve(made, observers=observers).head_scope
    assert (told,) == sp.UnionEstimator(relies, told).relies_on
    assert ("head", None) == (sp.Pipeline(relies).plan_scope, sp.Pipeline(relies).head_scope)


def test_what_a_stage_lacks() -> None:
    assert [] == missing(Asked(), sp.SparseExecutor)
    assert ["execute", "accumulate"] == missing(object(), sp.SparseExecutor)
    holder: Any = type("Holder", (), {"execute": 3, "accumulate": lambda self: None})()
    assert ["execute"] == missing(holder, sp.SparseExecutor)


def test_what_a_workspace_may_be() -> None:
    for good in (1, "auto", None):
        assert good == evolve(sp.Pipeline(Estimate()), workspace=good).workspace


def test_stages_in_their_order() -> None:
    one, two, three, four = Asked(), Refine(), Asked(), Observe()
    made = sp.Pipeline(one, (two,), three, (four,))
    assert (one, two, three, four) == made.stages
    assert (True, False) == (made.remembers, sp.Pipeline(one).remembers)
    assert (True, False) == (Route.of(made).remembers, Route.of(sp.Pipeline(one)).remembers)


class Choosy(Asked):
    """Made for one model."""

    def check_model(self, model: Any) -> None:
        raise ParameterError(f"not for {model}")


@pytest.mark.parametrize("place", ["estimator", "refiners", "executor", "observers"])
def test_every_stage_is_asked_about_the_model(place: str) -> None:
    plain: Any = sp.Pipeline(Asked(), (Asked(),), Asked(), (Asked(),))
    assert not plain.asks_model
    plain.check_model("any")
    choosy = evolve(plain, **{place: Choosy() if place in ("estimator", "executor") else (Asked(), Choosy())})
    for made in (choosy, Route.of(choosy)):
        assert made.asks_model
        with pytest.raises(ParameterError, match="not for this"):
            made.check_model(cast(Any, "this"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [8, 4])
def test_parts_have_the_types_and_shapes_of_the_whole(dtype: torch.dtype, width: int) -> None:
    call = make(32, heads=4, kv_heads=2, dtype=dtype)
    call = evolve(call, v=call.v[..., :width])
    made = sp.build("streaming", sink=8, window=8, block=8)
    whole, cut = made.run(call), evolve(made, workspace=1).run(call)
    assert cut.parts is not None
    assert cut.parts.count > 1
    assert (whole.out.dtype, whole.out.shape, whole.lse.dtype) == (cut.out.dtype, cut.out.shape, cut.lse.dtype)
    torch.testing.assert_close(whole.out, cut.out)
    assert torch.equal(whole.mask.pairs(), cut.parts.pairs)


def test_routes_of_several_lengths() -> None:
    streaming = sp.build("streaming", sink=8, window=8, block=8)
    one, both = Route("m", (streaming,)), Route("m", (streaming, sp.Pipeline(Estimate(grain=4))))
    holes = Route("m", (streaming, None))
    assert (1, None, None) == (one.method_grain, both.method_grain, holes.method_grain)
    assert (1, 2, 1) == (len(one.known), len(both.known), len(holes.known))
    assert Route.of(one) is one
    assert (streaming.name, None) == (Route.of(streaming).name, Route.of(streaming).gate)
    renamed = holes.each(lambda found: evolve(found, name="other"))
    assert ("other", None) == (renamed.name, renamed.pipelines[1])
    assert not one.asks_model


def test_a_length_without_a_setting() -> None:
    none = Route("m", (None,))
    assert isinstance(none.executing(CALL).given, AutoExecutor)
    reason = "no setting serves calls of this length"
    assert (f"_NoSetting: {reason}",) == none.unsupported(CALL)
    with pytest.raises(UnsupportedCallError, match=reason):
        none.run(CALL)
    mine = sp.ReferenceExecutor()
    assert Route.of(sp.Pipeline(Estimate(), executor=mine)).executing(CALL).given is mine


class Says:
    """A gate with one answer."""

    def __init__(self, worth: bool, reason: str) -> None:
        self.verdict = sp.Verdict(worth, None, reason)

    def judge(self, call: sp.AttentionCall, method: str) -> sp.Verdict:
        return self.verdict


def test_what_a_gate_says_reaches_the_choice() -> None:
    made = sp.Pipeline(Estimate())
    noted, objected = (Route("m", (made,), gate=Says(worth, "why")) for worth in (True, False))
    found = noted.choose(CALL)
    assert (made, "", "why") == (found.pipeline, found.dense, found.note)
    found = objected.choose(CALL)
    assert (made, "why", "") == (found.pipeline, found.dense, found.note)
    assert (True, False, True) == (noted.worth(CALL), objected.worth(CALL), Route.of(made).worth(CALL))
    assert ("", "") == (Choice(made).dense, Choice(made).note)
    empty = Route("m", (None,), gate=Says(False, "why")).choose(CALL)
    assert "why" == empty.dense
    with pytest.raises(UnsupportedCallError, match="no setting serves calls of this length"):
        empty.pipeline.run(CALL)
    assert 1.0 == objected.run(CALL).density
    assert (noted.grain, Route.of(made).grain) == (None, made.grain)


def test_nothing_is_skipped_where_no_plan_asks_for_it() -> None:
    result = sp.build("streaming", sink=4, window=8, block=16).run(make(40))
    assert result.skipped is None
    assert 0.0 == result.skipped_share
