"""RecallFloor against plain loops, on any plan, with and without a carry; its options, its notes, its errors."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.build import int32, make, one_lookup
from helpers.examples import part
from helpers.plans import plans, refined, whole
from lab.floors import Trial
from oracles import recall_floor as oracle
from sparseprefill.metrics import lowest_rows
from sparseprefill.testing import calls

# float64, so that no sum lies within rounding of the target and both choose the same tiles.
CALLS = calls(max_len=70, max_heads=2, head_dims=(2, 8), max_batch=2, groups=(1, 2), dtypes=(torch.float64,))
OPTIONS = st.fixed_dictionaries(
    {
        "target": st.sampled_from([0.95, 0.6, 0.999, 1.0, 0.0]) | st.floats(0.01, 0.99),
        "rows": st.sampled_from([64, 1, 2, 3, 5]),
        "span": st.sampled_from([None, None, 1, 2, 3]),
        "speaks_for": st.sampled_from(["neighbours", "stretch", "tile"]),
        "dense_from": st.sampled_from([0.5, 1.0, 0.1]),
    }
)


class Plain:
    """What a plan holds, read from its lists one by one."""

    def __init__(self, plan: sp.Plan) -> None:
        self.masks = [plan.mask] if plan.carry is None else [plan.mask, plan.carry.region]
        self.q = math.gcd(*[mask.tile_q for mask in self.masks])
        self.k = math.gcd(*[mask.tile_k for mask in self.masks])

    def held(self, b: int, h: int, tile: int, j: int) -> bool:
        return any(self._tile(mask, b, h, tile * self.q, j * self.k) for mask in self.masks)

    def _tile(self, mask: sp.SparseMask, b: int, h: int, x: int, y: int) -> bool:
        if mask.tiles is None:
            return False
        row = x // mask.tile_q - int(mask.geometry.first_tile(mask.tile_q)[b])
        return y // mask.tile_k in mask.tiles.row(b, h, row).tolist()


@part(6)
@given(data=st.data(), call=CALLS, options=OPTIONS)
def test_it_is_the_oracles_mask_and_recall(
    data: st.DataObject, call: sp.AttentionCall, options: dict[str, Any]
) -> None:
    tiles = st.sampled_from([8, (8, 12), (12, 8), 16])
    sparse = st.builds(lambda tile: sp.Plan(sp.SparseMask.empty(call, tile)), tiles)
    plan = data.draw(plans(call) | sparse)
    if options["span"] is not None:
        options["span"] *= Plain(plan).q * 2
    assert_oracles(call, plan, options)


@pytest.mark.parametrize("tile", [(8, 12), (12, 8), (8, 16), (16, 8)])
def test_samples_speak_along_the_diagonal_where_tiles_are_not_square(tile: tuple[int, int]) -> None:
    call = make(200, heads=4, kv_heads=2, dtype=torch.float64)
    plan = sp.Plan(sp.SparseMask.from_rules(call, tile, band=0))
    for speaks_for in ("stretch", "neighbours"):
        assert_oracles(call, plan, options(rows=4, target=0.3, speaks_for=speaks_for, dense_from=1.0))


def options(**given: Any) -> dict[str, Any]:
    """The floor's defaults, changed."""
    defaults = {"target": 0.95, "rows": 64, "span": None, "speaks_for": "neighbours", "dense_from": 0.5}
    return {**defaults, **given}


def assert_oracles(call: sp.AttentionCall, plan: sp.Plan, options: dict[str, Any]) -> None:
    """The same mask and notes as the oracle's."""
    plain = Plain(plan)
    if options["span"] is not None:
        options["span"] *= plain.q * 2
    after = refined(sp.RecallFloor(**options), call, plan)
    rule = oracle.Rule(tile_q=plain.q, tile_k=plain.k, **options)
    expected = oracle.recall_floor(call, rule, whole(plan), plain.held)
    assert torch.equal(expected.keep, whole(after))
    sample = after.notes["recall_sample"]
    for (b, h), rows in expected.samples.items():
        real = sample.real[b]
        assert list(rows) == sample.rows[b][real].tolist()
        for name, at in (("before", 0), ("after", 1)):
            each = [both[at] for both in rows.values()]
            torch.testing.assert_close(torch.tensor(each, dtype=torch.float64), getattr(sample, name)[b, h][real])
            mean = after.notes[f"recall_{name}"][b, h]
            assert math.isnan(mean) if not each else math.isclose(sum(each) / len(each), mean, abs_tol=1e-9)
        assert ((b, h) in expected.dense) == bool(after.notes["recall_dense"][b, h])


def test_an_observer_finds_the_recall_in_the_notes() -> None:
    seen: list[sp.Plan] = []

    class Watch:
        grain = 1

        def observe(self, call: sp.AttentionCall, plan: sp.Plan, result: sp.Result, memory: sp.Memory) -> None:
            seen.append(plan)

    call = make(300, heads=4, kv_heads=2)
    one = sp.build("streaming", sink=16, window=16, block=16)
    pipeline = evolve(one, refiners=(sp.RecallFloor(target=0.8),), observers=(Watch(),))
    result = pipeline.run(call)
    notes = seen[0].notes
    sample = notes["recall_sample"]
    # What the refiner promised is what the executor's exact LSE says.
    torch.testing.assert_close(sp.recall(call, result, rows=sample.rows[0]), sample.after)
    torch.testing.assert_close(sp.recall(call, one.run(call), rows=sample.rows[0]), sample.before)
    assert (1, 4) == tuple(notes["recall_before"].shape)
    assert bool((notes["recall_before"] < 0.8).all())
    assert bool((sample.after >= 0.8 - 1e-5).all())


def test_the_sample_tells_its_lowest_rows_before_and_after() -> None:
    """One row of 63 and two heads looks something up, far back; with its fellows it hears of it from the floor."""
    call = one_lookup(1008, 16 * 20 + 15, key=100)
    notes = sp.build("streaming", sink=16, window=64, block=16, recall=0.9).run(call).plan.notes
    sample = notes["recall_sample"]
    assert 63 == int(sample.real.sum())
    assert pytest.approx([1.0, 62 / 63], abs=1e-3) == notes["recall_before"][0].tolist()
    for kept, expected in ((sample.before, (1.0, 0.0)), (sample.after, (1.0, 1.0))):
        found = lowest_rows(kept.masked_fill(~sample.real[:, None], torch.nan))
        assert pytest.approx(expected, abs=1e-3) == tuple(map(float, found))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 251])
def test_the_last_row_is_always_sampled(length: int) -> None:
    call = make(length)
    for rows in (1, 2, 3, 64):
        sample = refined(sp.RecallFloor(rows=rows), call, sp.Plan(sp.SparseMask.empty(call, 16))).notes["recall_sample"]
        real = sample.rows[0][sample.real[0]].tolist()
        assert length - 1 == real[-1]
        assert min(rows, -(-length // 16)) == len(real)
        assert sorted(set(real)) == real


def test_pages_and_tensors_are_one() -> None:
    call = make(211, heads=4, kv_heads=2)
    page, table = 16, torch.randperm(14)
    cache = torch.zeros(2, 14, page, 2, call.q.shape[3])
    for x, held in zip((call.k, call.v), cache, strict=True):
        padded = torch.nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, 14 * page - 211))
        held[table] = padded.unflatten(0, (14, page))
    pages = sp.Pages(cache[0], cache[1], table.to(torch.int32), length=211)
    paged = sp.AttentionCall.of_pages(call.q, pages)
    floor = sp.RecallFloor(rows=5)
    expected, found = (floor.refine(one, sp.Plan(sp.SparseMask.empty(one, 16)), sp.Memory()) for one in (call, paged))
    assert torch.equal(expected.mask.to_dense(), found.mask.to_dense())
    assert torch.equal(expected.notes["recall_after"], found.notes["recall_after"])
    assert set() == set(pages.gathered)


def test_a_nan_query_adds_nothing() -> None:
    call = make(64)
    call.q[:, :, 31] = torch.nan
    plan = sp.Plan(sp.SparseMask.from_rules(call, 16, band=0))
    after = refined(sp.RecallFloor(speaks_for="tile", target=0.99, dense_from=1.0), call, plan)
    tiles = after.mask.tiles_on(16, 16)
    assert torch.equal(plan.mask.tiles_on(16, 16)[:, :, 1], tiles[:, :, 1])
    assert bool((tiles[:, :, 3].sum(-1) > 1).all())
    assert bool(after.notes["recall_after"].isnan().all())


def test_bfloat16_and_float16_are_measured_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        call = make(129, dtype=dtype)
        notes = refined(sp.RecallFloor(), call, sp.Plan(sp.SparseMask.empty(call, 16))).notes
        assert torch.float32 == notes["recall_after"].dtype
        assert bool((notes["recall_sample"].after >= 0.95 - 1e-5).all())


def test_a_padded_batch_says_nothing_of_rows_that_are_padding() -> None:
    call = make(64, batch=2, starts=int32(0, 64 - 17))
    sample = refined(sp.RecallFloor(rows=4), call, sp.Plan(sp.SparseMask.empty(call, 16))).notes["recall_sample"]
    assert [4, 2] == sample.real.sum(-1).tolist()
    assert [47 + 15, 63] == sample.rows[1][sample.real[1]].tolist()


def test_the_docs_table_of_what_floors_bring() -> None:
    """Made by `python -m lab.floors`; here of fewer tokens and one method."""
    alone, *wider, low, _, high = Trial(tokens=1024, measured=64).readings("vertical-slash")
    assert ["alone", "gamma=0.95", "gamma=0.98"] == [one.setting for one in (alone, *wider)]
    assert ["recall=0.8", "recall=0.95"] == [low.setting, high.setting]
    assert alone.density <= low.density < high.density <= 1
    assert alone.mean <= low.mean < high.mean <= 1
    assert alone.low < high.low


def test_a_span_is_the_grain() -> None:
    assert (None, 24) == (sp.RecallFloor().grain, sp.RecallFloor(span=24).grain)
