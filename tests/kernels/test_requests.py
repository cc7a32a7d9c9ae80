"""Several requests in one launch: the very bits of one by one, but where lists are cut by the launch's work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.launches import noted_launches
from kernels.caches import LAYOUTS, untouched
from kernels.device import BOUNDS, DEVICE
from kernels.each import HALVES, TRITON, each, portable_unless_named
from kernels.requests import mask_of, step_of
from sparseprefill import AttentionCall, Carry, Pages, Plan, ReferenceExecutor, SparseMask, output_error
from sparseprefill.kernels.family.record import Family
from sparseprefill.kernels.hopper.record import HOPPER

__all__ = ["portable_unless_named"]
# numpy, which the interpreter computes with, warns of the infinities that a softmax lives with
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
REFERENCE = ReferenceExecutor()
KINDS = ("full", "tiles", "stripes", "both", "wide")
TILE = (32, 16)
ROWS = (1, 2, 31, 61, 127, 128, 129)
SIZES = [(33, 70), (1, 20), (65, 65), (20, 31)]
LONG = (
    [(1, 1), (127, 127), (128, 900), (129, 129)],
    [(257, 1021), (1500, 1500)],
    [(300, 5000), (700, 3001), (64, 2048), (1000, 1000), (129, 4999)],
    [(17, 17)] * 8,
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_launches(monkeypatch)


def plans_of(calls: Sequence[AttentionCall], kind: str, tile: tuple[int, int] = TILE, group: int = 2) -> list[Plan]:
    return [Plan(mask_of(call, kind, tile, group, seed)) for seed, call in enumerate(calls)]


def check(calls: Sequence[AttentionCall], plans: Sequence[Plan], cut: bool = False) -> None:
    """The same bits, flags of kernels and sizes as one by one. cut: long lists may be cut elsewhere."""
    together = TRITON.execute_many(calls, plans)
    alone = [TRITON.execute(call, plan) for call, plan in zip(calls, plans, strict=True)]
    for call, plan, one, other in zip(calls, plans, together, alone, strict=True):
        assert one.out.shape == call.q.shape
        assert one.out.dtype == call.q.dtype
        if cut:
            assert output_error(one.out, other.out) <= BOUNDS[call.q.dtype]
            assert torch.allclose(one.lse, other.lse, atol=1e-4)
        else:
            assert torch.equal(one.out, other.out)
            assert torch.equal(one.lse, other.lse)
        assert [by.name for by in one.kernels] == [by.name for by in other.kernels]
        assert one.plan is plan
        assert one.skipped is None
        assert one.probe is None
        assert untouched(call)


def check_into(calls: Sequence[AttentionCall], plans: Sequence[Plan]) -> None:
    """Outputs lie in rows of one tensor, as a host has them, and nothing beside them is written to."""
    storage, q = calls[0].q.untyped_storage(), calls[0].q
    rows = torch.full((storage.nbytes() // q.element_size(),), 7.0, dtype=q.dtype, device=DEVICE)
    outs = [rows.as_strided(call.q.shape, call.q.stride(), call.q.storage_offset()) for call in calls]
    within = TRITON.execute_many_into(calls, plans, outs)
    for one, there, out in zip(TRITON.execute_many(calls, plans), within, outs, strict=True):
        assert there.out.data_ptr() == out.data_ptr()
        assert torch.equal(there.out, one.out)
        assert torch.equal(there.lse, one.lse)
        out.fill_(7.0)
    assert bool((rows == 7.0).all())


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=4))
    cached = draw(st.lists(st.sampled_from((0, 1, 17, 64, 101)), min_size=len(rows), max_size=len(rows)))
    ratio = draw(st.sampled_from((1, 2, 4)))
    return {
        "sizes": [(n, n + before) for n, before in zip(rows, cached, strict=True)],
        "heads": max(ratio, 2),
        "kv_heads": max(ratio, 2) // ratio,
        "page": draw(st.sampled_from((16, 128))),
        "layout": draw(st.sampled_from(sorted(LAYOUTS))),
        "gap": draw(st.sampled_from((0, 3))),
        "seed": draw(st.integers(0, 1 << 16)),
        "device": DEVICE,
    }


@settings(max_examples=50 if DEVICE == "cuda" else 6)
@given(step=steps(), kind=st.sampled_from(KINDS), tile=st.sampled_from([(32, 16), (64, 64), (128, 64)]))
def test_any_step(step: dict[str, Any], kind: str, tile: tuple[int, int]) -> None:
    calls = step_of(**step)
    plans = plans_of(calls, kind, tile)
    check(calls, plans)
    check_into(calls, plans)


def test_outputs_of_another_layout_are_copied() -> None:
    """Tensors that are no rows of one."""
    calls = step_of(SIZES, device=DEVICE)
    plans, outs = plans_of(calls, "both"), [torch.zeros_like(call.q) for call in calls]
    for there, one, out in zip(
        TRITON.execute_many_into(calls, plans, outs), TRITON.execute_many(calls, plans), outs, strict=True
    ):
        assert there.out is out
        assert torch.equal(out, one.out)


@each(HOPPER, dtype=HALVES, width=[64, 128, 256], page=[16, 128], layout=sorted(LAYOUTS))
def test_long_steps(
    kernel: Family, dtype: torch.dtype, width: int, page: int, layout: str, launches: list[int]
) -> None:
    for number, sizes in enumerate(LONG):
        of: dict[str, Any] = {"heads": (8, 4, 8, 2)[number], "kv_heads": 2, "width": width, "page": page}
        garbage = (math.nan, 3.0)[number % 2]  # behind the last key: what is not finite has blocks repaired
        calls = step_of(
            sizes, dtype=dtype, layout=layout, device=DEVICE, gap=number % 2, seed=number, garbage=garbage, **of
        )
        tile = ((128, 128), (128, 64), (256, 128))[number % 3]
        for kind in KINDS:
            plans = plans_of(calls, kind, tile)
            launches.clear()
            served = {by.name for one in TRITON.execute_many(calls, plans) for by in one.kernels}
            assert served == {kernel.name}
            assert launches == [len(calls)]
            check(calls, plans, cut=max(keys for _, keys in sizes) > 4000)
            if number == 1:
                check_into(calls, plans)


@each(HOPPER)
@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
def test_nothing_waits_for_the_device(kernel: Family) -> None:
    """The second time, when all is compiled and kept."""
    calls = step_of(LONG[2], heads=8, kv_heads=2, width=128, dtype=torch.bfloat16, device=DEVICE)
    for mode in ("default", "error"):
        plans = plans_of(calls, "both", (128, 128))
        [plan.mask.tiles for plan in plans]
        torch.cuda.set_sync_debug_mode(mode)
        try:
            TRITON.execute_many(calls, plans)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_one_launch_serves_all(launches: list[int], kind: str) -> None:
    calls = step_of(SIZES, device=DEVICE)
    plans = plans_of(calls, kind)
    results = TRITON.execute_many(calls, plans)
    assert launches == [4]
    for call, plan, result in zip(calls, plans, results, strict=True):
        expected = REFERENCE.execute(call, plan)
        assert output_error(result.out, expected.out) <= 2e-3
        assert torch.allclose(result.lse, expected.lse, atol=2e-3)


@pytest.mark.parametrize(
    "fields",
    [{"window": 40}, {"softcap": 8.0, "scale": 0.3}, {"sinks": torch.tensor([-1.0, 0.0, 1.0, 3.0])}],
    ids=["window", "softcap", "sinks"],
)
def test_what_holds_for_every_request(launches: list[int], fields: dict[str, Any]) -> None:
    fields = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in fields.items()}
    calls = step_of(SIZES[:3], device=DEVICE, **fields)
    check(calls, plans_of(calls, "both"))
    assert launches == [3, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])], ids=str)
def test_other_types(launches: list[int], dtype: torch.dtype) -> None:
    calls = step_of(SIZES[:2], device=DEVICE, dtype=dtype, width=80)
    check(calls, plans_of(calls, "both"))
    assert launches[0] == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_reach_only_rows_that_see_them(launches: list[int], value: float) -> None:
    """Blocks are repaired, and those of one request alone."""
    calls = step_of([(20, 20), (40, 60), (10, 70)], heads=2, kv_heads=1, device=DEVICE, garbage=value)
    pages = calls[1].pages
    assert pages is not None
    pages.v[int(pages.table[50 // pages.page]), 50 % pages.page] = value
    plans = plans_of(calls, "both")
    results = TRITON.execute_many(calls, plans)
    for i, (plan, result) in enumerate(zip(plans, results, strict=True)):
        seen = plan.mask.to_dense()[..., 50] if i == 1 else torch.zeros_like(result.lse, dtype=torch.bool)
        assert torch.equal(~torch.isfinite(result.out).all(-1), seen)
        alone = TRITON.execute(calls[i], plan)
        assert torch.equal(alone.out.nan_to_num(7.0), result.out.nan_to_num(7.0))
    assert launches == [3, 1, 1, 1]


def _tensors(call: AttentionCall, plan: Plan) -> tuple[AttentionCall, Plan]:
    return evolve(call, k=call.k, v=call.v), plan


def _elsewhere(call: AttentionCall, plan: Plan) -> tuple[AttentionCall, Plan]:
    return evolve(call, q=call.q.clone()), plan


def _shorter(call: AttentionCall, plan: Plan) -> tuple[AttentionCall, Plan]:
    call = evolve(call, lengths=torch.tensor([call.kv_len - 1], dtype=torch.int32, device=DEVICE))
    return call, Plan(SparseMask.full(call, TILE))


def _resumed(call: AttentionCall, plan: Plan) -> tuple[AttentionCall, Plan]:
    nothing = SparseMask.empty(call, TILE)
    return call, Plan(plan.mask, Carry(TRITON.accumulate(call, Plan(nothing)), nothing))


def _copy_of_the_cache(call: AttentionCall, plan: Plan) -> tuple[AttentionCall, Plan]:
    pages = call.pages
    assert pages is not None
    other = Pages(pages.k.clone(), pages.v.clone(), pages.table, pages.length)
    return evolve(call, k=other, v=other), plan


ALONE: dict[str, Any] = {
    "keys as tensors": _tensors,
    "rows elsewhere": _elsewhere,
    "another cache": _copy_of_the_cache,
    "padding": _shorter,
    "a carry": _resumed,
    "probes": lambda call, plan: (call, evolve(plan, probe=torch.ones(1, 2, dtype=torch.bool, device=DEVICE))),
    "thresholds": lambda call, plan: (call, evolve(plan, skip_below=torch.full((1,), 0.01, device=DEVICE))),
    "a scale": lambda call, plan: (evolve(call, scale=0.5), plan),
    "tiles": lambda call, plan: (call, Plan(SparseMask.full(call, 64))),
    "stripes": lambda call, plan: (call, Plan(mask_of(call, "both", TILE))),
}


@pytest.mark.parametrize("odd", ALONE)
def test_what_differs_runs_alone(launches: list[int], odd: str) -> None:
    calls = step_of(SIZES[1:], heads=2, kv_heads=1, device=DEVICE)
    plans = plans_of(calls, "full")
    calls[1], plans[1] = ALONE[odd](calls[1], plans[1])
    launches.clear()
    results = TRITON.execute_many(calls, plans)
    assert sorted(launches) == [1, 2]
    for call, plan, result in zip(calls, plans, results, strict=True):
        again = TRITON.execute(call, plan)
        assert torch.equal(again.out, result.out)
        assert torch.equal(again.lse, result.lse)
        assert (again.probe is None) == (result.probe is None)
        assert (again.skipped is None) == (result.skipped is None)


def test_two_groups_of_a_step_are_two_launches(launches: list[int]) -> None:
    calls = step_of(SIZES, device=DEVICE)
    plans = [Plan(mask_of(call, kind, TILE)) for call, kind in zip(calls, ("full", "both") * 2, strict=True)]
    check(calls, plans)
    assert sorted(launches[:-4]) == [2, 2]


def test_one_call_and_none(launches: list[int]) -> None:
    (call,) = step_of([(33, 50)], device=DEVICE)
    plan = Plan(SparseMask.full(call, TILE))
    check([call], [plan])
    assert TRITON.execute_many([], []) == []
    assert launches == [1, 1]
