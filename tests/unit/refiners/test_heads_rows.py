"""The union over a GQA group, and dense last rows; and all refiners on a method that computes output on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import int32, make
from helpers.examples import few_calls, few_of
from helpers.plans import CALLS, Positions, plans, refined, tile_of, whole
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.testing import attention, check_laws, check_method

DATA = st.data()


def over_group(dense: torch.Tensor, group: int) -> torch.Tensor:
    heads = [dense[:, h // group * group : h // group * group + group].any(1) for h in range(dense.shape[1])]
    return torch.stack(heads, 1)


@given(call=CALLS, data=DATA)
def test_gqa_union(call: sp.AttentionCall, data: st.DataObject) -> None:
    plan = data.draw(plans(call))
    after = whole(refined(sp.GqaUnion(), call, plan))
    assert torch.equal(over_group(whole(plan), call.group), after)


@given(call=CALLS, data=DATA, stripes=st.booleans())
def test_gqa_union_beside_a_region_that_all_heads_share(
    call: sp.AttentionCall, data: st.DataObject, stripes: bool
) -> None:
    region = sp.build("streaming", sink=8, window=8, block=8).estimator.estimate(call, sp.Memory()).mask
    mask = data.draw(plans(call, kinds=("stripes",) if stripes else ("tiles",), carry=False)).mask - region
    plan = sp.Plan(mask, sp.Carry(ReferenceExecutor().accumulate(call, sp.Plan(region)), region))
    assert region.tiles is not None
    assert region.tiles.same_heads
    after = refined(sp.GqaUnion(), call, plan)
    assert torch.equal(over_group(whole(plan), call.group), whole(after))
    assert plan.mask.group_rows == after.mask.group_rows


def test_lists_are_the_same_for_all_heads_where_the_maker_says_so() -> None:
    call = make(90, heads=4, batch=2, starts=int32(0, 31))
    streaming = sp.build("streaming", sink=8, window=20, block=8).estimator.estimate(call, sp.Memory()).mask
    for mask in (sp.SparseMask.full(call, 16), streaming):
        assert mask.tiles is not None
        assert mask.tiles.same_heads
        assert bool((mask.tile_map() == mask.tile_map()[:, :1]).all())
    united = (streaming | sp.SparseMask.empty(call, 8)).tiles, (streaming | sp.SparseMask.full(call, 8)).tiles
    expected = [True, False]  # lists that are made anew say nothing
    assert expected == [lists.same_heads for lists in united if lists is not None]


@given(
    call=CALLS,
    data=DATA,
    last=st.integers(1, 120),
    tile=st.none() | st.sampled_from([1, 8, 24]),
    prompt=st.none() | st.integers(0, 120),
)
def test_dense_rows(
    call: sp.AttentionCall, data: st.DataObject, last: int, tile: int | None, prompt: int | None
) -> None:
    plan, at = data.draw(plans(call)), Positions.of(call)
    size = tile_of(plan.mask, tile)[0]
    real = at.allowed.any(-1, keepdim=True)
    end = torch.where(real, at.query + 1, 0).amax(2, keepdim=True)
    if prompt is not None:
        each = data.draw(st.booleans(), label="a tensor")
        call = evolve(call, prompt_lengths=int32(*[prompt] * call.q.shape[0]) if each else prompt)
        end = torch.full_like(end, prompt)
    dense = real & ((at.query // size + 1) * size > end - last)
    after = whole(refined(sp.DenseRows(last, tile=tile), call, plan))
    assert torch.equal(whole(plan) | (dense & at.allowed), after)
    for b in range(real.shape[0] if prompt is None else 0):  # the last rows, counted
        rows = real[b, 0, :, 0].nonzero()[-last:, 0]
        assert torch.equal(at.allowed[b, :, rows].expand_as(after[b, :, rows]), after[b, :, rows])


def test_dense_rows_depend_on_the_chunks() -> None:
    """Of calls that do not say how long their prompt is."""
    pipeline = evolve(sp.build("streaming", sink=8, window=8, block=8), refiners=(sp.DenseRows(8),))
    call = make(64)
    part = sp.AttentionCall(call.q[:, :, :32], call.k[:, :, :32], call.v[:, :, :32])
    dense = part.geometry.visible()[0, 24:]
    assert torch.equal(dense, pipeline.run(part).mask.to_dense()[0, 0, 24:])
    assert not torch.equal(dense, pipeline.run(call).mask.to_dense()[0, 0, 24:32, :32])


REFINERS: tuple[Any, ...] = (
    sp.LocalBand(2, tile=16),
    sp.Sink(3),
    sp.StrideRescue(3),
    sp.RandomRescue(0.3, tile=8),
    sp.GqaUnion(),
    sp.DenseRows(5),
    sp.BudgetFloor(share=0.6),
    sp.BudgetCeiling(tiles=4),
)


# Dense rows and budgets: tests/property/test_hybrids.py.
@pytest.mark.parametrize("refiner", REFINERS[:5], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("method", few_of(["anchor-attention", "vertical-slash"], ["anchor-attention"]))
def test_every_refiner_keeps_the_contracts_of_a_method(method: str, refiner: Any) -> None:
    built = sp.build(method, **sp.default_registry().get(method).small)
    hybrid = evolve(built, refiners=(refiner,), name=f"{method} + {type(refiner).__name__}")
    report = check_method(hybrid, calls=few_calls())
    assert "carry and mask disjoint" in report.cases
    assert built.grain is None or hybrid.grain == built.grain


def test_all_refiners_together_on_a_plan_with_a_carry() -> None:
    call = make(230, heads=4, kv_heads=2, batch=2, starts=int32(0, 77), kind="stripes", dtype=torch.float64)
    built = sp.build("anchor-attention", theta=1.0, step=2, block=16, init_tokens=24)
    hybrid = evolve(built, refiners=REFINERS[:5])
    result = hybrid.run(call)
    out, _ = attention(call, result.mask.to_dense())
    torch.testing.assert_close(out, result.out, rtol=1e-10, atol=1e-10)
    assert built.run(call).density < result.density < 1
    check_laws(hybrid, ("batch rows independent",), calls=[call])
