"""Refiners on a small call, tile by tile, written down by hand."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import sparseprefill as sp
from helpers.build import int32, make
from helpers.stubs import Estimate
from sparseprefill.mask.lists import IndexLists
from sparseprefill.memory import Memory
from sparseprefill.refiners.rescue import over_group
from sparseprefill.union import UnionEstimator

CALL = make(24, 40)  # queries 16 .. 39: query tiles 2, 3, 4 of 8 tokens


def after(refiner: Any, call: sp.AttentionCall = CALL, tile: int = 8) -> list[list[int]]:
    """What a refiner makes of nothing: the tiles of head 0, row by row."""
    plan = refiner.refine(call, sp.Plan(sp.SparseMask.empty(call, tile)), Memory())
    return [torch.nonzero(row)[:, 0].tolist() for row in plan.mask.tile_map()[0, 0]]


def test_a_band_is_the_diagonal_and_so_many_before() -> None:
    assert [[2], [3], [4]] == after(sp.LocalBand(0))
    assert [[1, 2], [2, 3], [3, 4]] == after(sp.LocalBand(1))
    assert [[0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]] == after(sp.LocalBand(3))
    assert [[0, 1], [1, 2]] == [row[-2:] for row in after(sp.LocalBand(1, tile=16))][:2]


def test_a_sink_is_the_first_tiles() -> None:
    assert [[], [], []] == after(sp.Sink(0))
    assert [[0, 1]] * 3 == after(sp.Sink(2))
    assert [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]] == after(sp.Sink(4))


@pytest.mark.parametrize(
    ("last", "rows"), [(1, [4]), (8, [4]), (9, [3, 4]), (16, [3, 4]), (17, [2, 3, 4]), (99, [2, 3, 4])]
)
def test_the_last_rows_in_whole_tiles(last: int, rows: list[int]) -> None:
    assert [list(range(i + 1)) if i in rows else [] for i in (2, 3, 4)] == after(sp.DenseRows(last))


@pytest.mark.parametrize(
    ("prompt", "rows"), [(40, [4]), (32, [3, 4]), (33, [4]), (41, []), (16, [2, 3, 4]), (0, [2, 3, 4]), (1000, [])]
)
def test_the_last_rows_of_the_prompt_that_the_call_names(prompt: int, rows: list[int]) -> None:
    """40 tokens are there: more are to come, or some are behind the prompt, as dense as it would have decoded them."""
    for given in (prompt, int32(prompt)):
        call = make(24, 40, prompt_lengths=given)
        assert [list(range(i + 1)) if i in rows else [] for i in (2, 3, 4)] == after(
            sp.DenseRows(8 if prompt == 40 else 1), call
        )
    plan = sp.Plan(sp.SparseMask.empty(CALL, 8))
    assert (not rows) == (sp.DenseRows(1).refine(make(24, 40, prompt_lengths=prompt), plan, Memory()) is plan)


def test_the_last_rows_end_with_the_real_ones() -> None:
    call = make(24, batch=2, lengths=int32(24, 9))
    plan = sp.DenseRows(1).refine(call, sp.Plan(sp.SparseMask.empty(call, 8)), Memory())
    assert [[0, 0, 3], [0, 2, 0]] == plan.mask.tile_map()[:, 1].sum(-1).tolist()


def test_every_so_many_and_a_share_of_the_tiles() -> None:
    assert [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]] == after(sp.StrideRescue(1)) == after(sp.RandomRescue(1.0))
    assert [[]] * 3 == after(sp.RandomRescue(0.0)) == after(sp.RandomRescue(2.0**-33))
    call = make(512, heads=1)
    counts = [len(row) for row in after(sp.RandomRescue(0.25), call, 4)]
    assert 0.2 < sum(counts) / (128 * 129 / 2) < 0.3
    for i, row in enumerate(after(sp.StrideRescue(4), call, 4)):
        assert [4] * (len(row) - 1) == [b - a for a, b in pairwise(row)]
        assert (i + 1) // 4 <= len(row) <= -(-(i + 1) // 4)


def test_a_share_of_nothing_changes_nothing() -> None:
    plan = sp.Plan(sp.SparseMask.empty(CALL, 8))
    assert sp.RandomRescue(0.0).refine(CALL, plan, Memory()) is plan
    assert sp.RandomRescue(2.0**-32).refine(CALL, plan, Memory()) is not plan


@pytest.mark.parametrize("kind", [sp.StrideRescue, sp.RandomRescue])
def test_seeds_layers_and_heads_choose_otherwise(kind: Any) -> None:
    """Also those of which only the high bits differ; the two kinds do not choose alike."""
    size: Any = 5 if kind is sp.StrideRescue else 0.3
    first = [after(kind(size, seed=seed), make(128, layer=layer), 4) for seed, layer in ((0, 0), (1 << 40, 0), (0, 1))]
    assert first[0] != first[1]
    assert first[0] != first[2]
    assert first[0] == after(kind(size), make(128), 4)


def test_bounds_are_allowed() -> None:
    assert (0, 0, 1, 1) == (sp.LocalBand(0).tiles, sp.Sink(0).tiles, sp.StrideRescue(1).every, sp.DenseRows(1).last)
    assert (0.0, 1.0) == (sp.RandomRescue(0.0).share, sp.RandomRescue(1.0).share)
    assert (0, 0) == (sp.BudgetCeiling(tiles=1, sink=0, local=0).sink, sp.BudgetCeiling(tiles=1, local=0).local)
    assert (1, 1) == (sp.BudgetCeiling(tiles=1).sink, sp.BudgetCeiling(tiles=1).local)
    assert (0, 0) == (sp.StrideRescue(2).seed, sp.RandomRescue(0.5).seed)
    for kind in (
        sp.LocalBand,
        sp.Sink,
        sp.StrideRescue,
        sp.RandomRescue,
        sp.BudgetFloor,
        sp.BudgetCeiling,
        sp.DenseRows,
    ):
        assert (1, "head") == (kind.grain, kind.head_scope)
    assert (1, "group") == (sp.GqaUnion.grain, sp.GqaUnion.head_scope)


def test_one_head_a_group_is_no_union() -> None:
    call = make(24, heads=2, kv_heads=2)
    plan = sp.Plan(sp.SparseMask.full(call, 8))
    assert sp.GqaUnion().refine(call, plan, Memory()) is plan


def test_lists_that_all_heads_share_stay_as_they_are() -> None:
    call = make(24, heads=4, kv_heads=2)
    full = IndexLists.full(call.geometry, 8, 8)
    mask = sp.SparseMask(call.geometry, 8, 8, full, 1, IndexLists.empty(1, 4, 3, torch.device("cpu")), disjoint=True)
    found = over_group(mask, 2)
    assert not found.disjoint
    assert torch.equal(mask.to_dense(), found.to_dense())
    alike = IndexLists(*(getattr(mask.stripes, name) for name in ("counts", "offsets", "indices")), same_heads=True)
    assert over_group(sp.SparseMask(call.geometry, 8, 8, None, 1, alike), 2).stripes is alike


def test_a_union_of_one_is_that_one() -> None:
    plan = sp.Plan(sp.SparseMask.full(CALL, 8))
    assert UnionEstimator(Estimate(lambda *_: plan)).estimate(CALL, Memory()) is plan


def test_the_bound_of_a_union_is_that_of_its_parts_and_of_the_maps() -> None:
    from sparseprefill.parts.workspace import default_workspace

    class Bounded(Estimate):
        def workspace(self, call: sp.AttentionCall) -> int:
            return 1000

    assert 1000 == UnionEstimator(Bounded()).workspace(CALL)
    assert 2000 + default_workspace(CALL) == UnionEstimator(Bounded(), Bounded()).workspace(CALL)


def test_what_parts_of_a_union_leave() -> None:
    heads = [torch.tensor([[True, False]]), torch.tensor([[False, True]])]
    masks = [sp.SparseMask.from_rules(CALL, 8, sink=1), sp.SparseMask.from_rules(CALL, 8, band=0)]
    plans = [
        sp.Plan(mask, probe=probe, notes={"both": i, f"own {i}": i})
        for i, (mask, probe) in enumerate(zip(masks, heads, strict=True))
    ]
    parts = [Estimate(lambda *_, plan=plan: plan) for plan in plans]
    found = UnionEstimator(*parts).estimate(CALL, Memory())
    assert {"both": 0, "own 0": 0, "own 1": 1} == dict(found.notes)
    assert found.probe is not None
    assert [[True, True]] == found.probe.tolist()
    assert torch.equal(masks[0].to_dense() | masks[1].to_dense(), found.mask.to_dense())
    none = UnionEstimator(*(Estimate(lambda *_, mask=mask: sp.Plan(mask)) for mask in masks)).estimate(CALL, Memory())
    assert none.probe is None


def test_objections_of_parts_are_named_once() -> None:
    same, other = Estimate(objection="no windows"), Estimate(objection="no sinks")
    assert "Estimate: no windows; Estimate: no sinks" == UnionEstimator(same, same, other).unsupported(CALL)
    assert UnionEstimator(Estimate()).unsupported(CALL) is None
