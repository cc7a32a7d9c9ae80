"""Pipeline: composition, order, grain, memory, unsupported calls."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import int32, make
from helpers.stubs import Estimate, Observe, Refine
from sparseprefill.call import AttentionCall
from sparseprefill.errors import MaskError, UnsupportedCallError
from sparseprefill.mask.mask import SparseMask
from sparseprefill.memory import Memory
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.testing import attention

CALL = make(40)


def narrow(call: Any, _: Any = None) -> Plan:
    return Plan(SparseMask.from_tiles(call, torch.zeros(1, 1, dtype=torch.bool), 8))


def test_call_returns_the_output_of_run() -> None:
    pipeline = Pipeline(Estimate())
    expected = pipeline.run(CALL).out
    assert torch.equal(expected, pipeline(CALL.q, CALL.k, CALL.v))
    assert CALL.q.dtype == expected.dtype


def test_call_passes_its_arguments_on() -> None:
    seen: list[Any] = []
    pipeline = Pipeline(Estimate(), observers=(Observe(lambda call, *_: seen.append(call)),))
    memory = Memory()
    pipeline(CALL.q[:, :, :8], CALL.k, CALL.v, 0.5, 3, 7, memory, window=5, softcap=2.0)
    call = seen[0]
    assert (0.5, 3, 7, 5, 2.0) == (call.scale, call.q_offset, call.layer, call.window, call.softcap)


@pytest.mark.parametrize("name", ["starts", "lengths"])
def test_mask_for_other_padding_is_refused(name: str) -> None:
    """Such a mask leaves rows empty without a word."""
    call, other = (make(16, batch=2, **dict[str, Any]({name: rows})) for rows in (int32(0, 5), int32(9, 12)))
    with pytest.raises(MaskError, match=rf"returned a mask for .*{name}=\[9, 12\].*the call is .*{name}=\[0, 5\]"):
        Pipeline(Estimate(lambda *_: Plan(SparseMask.full(other, 4)))).run(call)


def test_refiner_added_with_evolve_widens_the_mask() -> None:
    base = Pipeline(Estimate(narrow))
    widen = Refine(lambda call, plan, _: evolve(plan, mask=plan.mask | SparseMask.full(call, 8)))
    wide = evolve(base, refiners=(*base.refiners, widen))
    assert base.run(CALL).density < 1.0
    torch.testing.assert_close(wide.run(CALL).out.double(), attention(CALL)[0], atol=1e-5, rtol=1e-5)
    assert () == base.refiners


def test_stages_of_different_plugins_compose() -> None:
    mixed = evolve(sp.build("anchor-attention", theta=0.0, step=1, block=16, init_tokens=16))
    streaming = sp.build("streaming", sink=16, window=16, block=16)
    union = Refine(lambda call, plan, memory: evolve(plan, mask=streaming.estimator.estimate(call, memory).mask))
    result = evolve(mixed, estimator=Estimate(narrow), refiners=(union,)).run(CALL)
    assert torch.equal(streaming.run(CALL).mask.to_dense(), result.mask.to_dense())


def test_stages_run_in_order() -> None:
    order: list[str] = []

    def note(name: str, answer: Any = None) -> Any:
        def stage(*args: Any) -> Any:
            order.append(name)
            return args[1] if name.startswith("refine") else answer(*args) if answer else None

        return stage

    pipeline = Pipeline(
        Estimate(note("estimate", narrow)),
        refiners=(Refine(note("refine 1")), Refine(note("refine 2"))),
        observers=(Observe(note("observe 1")), Observe(note("observe 2"))),
    )
    pipeline.run(CALL)
    assert ["estimate", "refine 1", "refine 2", "observe 1", "observe 2"] == order
    names = [type(stage).__name__ for stage in pipeline.stages]
    assert ["Estimate", "Refine", "Refine", "AutoExecutor", "Observe", "Observe"] == names


def test_observer_sees_the_result_and_writes_memory() -> None:
    def keep(call: Any, plan: Plan, result: Any, memory: Memory) -> None:
        memory.put(("seen", call.layer), result.density)

    memory = Memory()
    pipeline = Pipeline(Estimate(narrow), observers=(Observe(keep),))
    result = pipeline.run(evolve(CALL, layer=3), memory)
    assert result.density == memory.get(("seen", 3), None)


def test_memory_is_the_same_object_for_every_stage() -> None:
    seen: list[Memory] = []

    def estimate(call: AttentionCall, memory: Memory) -> Plan:
        seen.append(memory)
        return narrow(call)

    def refine(_: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        seen.append(memory)
        return plan

    pipeline = Pipeline(
        Estimate(estimate),
        refiners=(Refine(refine),),
        observers=(Observe(lambda *args: seen.append(args[-1])),),
    )
    memory = Memory()
    pipeline.run(CALL, memory)
    assert all(memory is one for one in seen)
    seen.clear()
    pipeline.run(CALL)
    assert 1 == len({id(one) for one in seen})
    assert memory is not seen[0]


def test_grain_is_the_least_common_multiple() -> None:
    assert 12 == Pipeline(Estimate(grain=4), refiners=(Refine(grain=6),)).grain


@pytest.mark.parametrize(
    "stages",
    [
        {"estimator": Estimate(grain=None)},
        {"estimator": Estimate(grain=4), "refiners": (Refine(grain=None),)},
        {"estimator": Estimate(grain=4), "observers": (Observe(),)},
    ],
)
def test_one_stage_without_a_grain_leaves_none(stages: dict[str, Any]) -> None:
    assert Pipeline(**stages).grain is None


def test_every_objection_is_raised() -> None:
    pipeline = Pipeline(Estimate(objection="no windows"), refiners=(Refine(),))
    assert ("Estimate: no windows",) == pipeline.unsupported(CALL)
    with pytest.raises(UnsupportedCallError, match="no windows") as caught:
        pipeline.run(CALL)
    assert ("Estimate: no windows",) == caught.value.reasons


def test_subclass_without_its_method_is_refused_by_python() -> None:
    class Half(sp.SparseExecutor):
        def execute(self, call: Any, plan: Any) -> Any: ...

    with pytest.raises(TypeError, match="accumulate"):
        Half()  # type: ignore[abstract]
