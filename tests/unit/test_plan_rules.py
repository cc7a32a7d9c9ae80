"""Rules of a plan: collected as data, united with the mask once, and the same pairs as masks united one by one."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import make
from helpers.stubs import Estimate
from sparseprefill.errors import StageError
from sparseprefill.mask.tile_map import Random, Stride
from sparseprefill.plan import Carry, Plan

CALL = make(90, heads=4, kv_heads=2)
EVERY: dict[str, list[dict[str, Any]]] = {
    "places": [{"sink": 1}, {"band": 1}, {"sink": 2}, {"dense": (3, 5)}],
    "hashes": [{"stride": Stride(3, 7)}, {"random": Random(1 << 29, 5), "first_head": 2}, {"stride": Stride(2, 1)}],
    "rows": [{"dense": (0, 2)}, {"band": 0}, {"dense": (4, 6)}],
    "none": [{}],
}


def bases() -> dict[str, sp.SparseMask]:
    keep = torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.2
    columns = torch.rand(1, 4, 6, 90, generator=torch.Generator().manual_seed(2)) < 0.1
    mapped = sp.SparseMask.from_tiles(CALL, keep, 16)
    lists = evolve(mapped, tiles=mapped.tiles)
    striped = sp.SparseMask.from_stripes(CALL, columns, 1, 16)
    alone = sp.SparseMask.from_stripes(CALL, columns, 1, 16, diagonal=False)
    apart = evolve(alone, disjoint=True)
    return {
        **{"map": mapped, "lists": lists, "stripes": striped, "stripes alone": alone, "disjoint": apart},
        "nothing": sp.SparseMask.empty(CALL, 16),
    }


def carry_of(mask: sp.SparseMask) -> Carry:
    return Carry(sp.ReferenceExecutor().accumulate(CALL, Plan(mask)), mask)


def one_by_one(plan: Plan, tile: int | None, rules: dict[str, Any]) -> Plan:
    return plan.widen(sp.SparseMask.from_rules(CALL, plan.grid(tile), **rules))


REGIONS = {
    "no carry": None,
    "of the same tiles": sp.SparseMask.from_rules(CALL, 16, sink=1),
    "of others": sp.SparseMask.from_rules(CALL, 8, band=1),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("rules", EVERY)
@pytest.mark.parametrize("base", bases())
def test_rules_are_what_masks_of_them_would_be(base: str, rules: str, region: str) -> None:
    held, mask = REGIONS[region], bases()[base]
    plan = Plan(mask) if held is None else Plan(mask - held, carry_of(held))
    wanted = plan
    for i, one in enumerate(EVERY[rules]):
        tile = 8 if i == 2 else None
        plan, wanted = plan.keep(tile, **one), one_by_one(wanted, tile, one)
        assert wanted.grid() == plan.grid()
    assert torch.equal(wanted.mask.to_dense(), plan.mask.to_dense())
    if held is not None:
        assert not bool((plan.mask.to_dense() & held.to_dense()).any())


@given(st.lists(st.sampled_from([*EVERY["places"], *EVERY["hashes"]]), min_size=1, max_size=5), st.booleans())
def test_any_rules_in_any_order(rules: list[dict[str, Any]], read: bool) -> None:
    plan = wanted = Plan(bases()["map"])
    for one in rules:
        plan, wanted = plan.keep(**one), one_by_one(wanted, None, one)
        if read:  # in between, as a refiner that narrows would
            assert torch.equal(wanted.mask.to_dense(), plan.mask.to_dense())
    assert torch.equal(wanted.mask.to_dense(), plan.mask.to_dense())


def test_they_are_united_once_when_the_mask_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made, unite = Counter[int](), sp.SparseMask.with_rules
    monkeypatch.setattr(sp.SparseMask, "with_rules", lambda self, rules, *more: made.update([len(rules)]) or unite(
        self, rules, *more))  # fmt: skip
    plan = Plan(bases()["map"]).keep(sink=1).keep(band=1).keep(dense=(4, 6))
    assert ({}, (16, 16)) == (made, plan.grid())
    assert plan.geometry is CALL.geometry
    later = evolve(plan, notes={"a": 1})
    assert later.mask is plan.mask
    assert {3: 1} == made
    result = evolve(sp.build("bfla", tile=16, block=16, group=8), workspace=None).with_tail(20).run(CALL)
    assert {3: 1, 4: 1} == made
    assert result.plan.mask is result.mask


def test_a_refiner_in_between_sees_the_union_and_has_the_last_word() -> None:
    start = sp.SparseMask.from_rules(CALL, 16, band=0)
    made = sp.Pipeline(Estimate(lambda call, _: Plan(start)), refiners=(sp.LocalBand(4), sp.BudgetCeiling(tiles=2)))
    plan = made.plan(CALL, sp.Memory())
    assert 2 == int(plan.mask.tile_map().sum(-1).max())
    emptied = evolve(Plan(start).keep(sink=3), mask=start)
    assert torch.equal(start.to_dense(), emptied.mask.to_dense())


def test_all_masks_of_a_plan() -> None:
    region = sp.SparseMask.from_rules(CALL, 8, sink=1)
    plan = Plan(sp.SparseMask.from_rules(CALL, 16, band=0) - region, carry_of(region)).keep(sink=1)
    assert (region, plan.mask) == plan.masks
    assert (plan.mask,) == evolve(plan, carry=None).masks
    assert torch.equal(plan.mask.tiles_on(8, 8) | region.tiles_on(8, 8), plan.tiles_on(8, 8))
    assert not bool(Plan(sp.SparseMask.empty(CALL, 16)).tiles_on(16, 16).any())


def test_a_plan_with_rules_can_be_copied() -> None:
    plan = Plan(bases()["lists"]).keep(sink=1).keep(stride=Stride(2, 5))
    assert torch.equal(plan.mask.to_dense(), pickle.loads(pickle.dumps(plan)).mask.to_dense())


def test_a_mask_that_cannot_be_made_is_the_estimators() -> None:
    with pytest.raises(StageError, match="Estimate"):
        sp.Pipeline(Estimate(lambda call, _: Plan(lambda: 1 / 0))).run(CALL)  # type: ignore[arg-type, return-value]
