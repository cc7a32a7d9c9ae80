"""Laws of a RecallFloor that looks at a share of all rows: what it promises, whatever the call and the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.plans import plans, refined, whole
from property.test_recall_floor import CLOSE, assert_reached, dense
from sparseprefill.refiners import row_floor
from sparseprefill.testing import calls, tensors

DATA = st.data()
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CALLS = calls(max_len=131, max_heads=8, head_dims=(8, 16), max_batch=2, dtypes=DTYPES)
SIZES: st.SearchStrategy[int | tuple[int, int]] = st.sampled_from([16, 8, 64, (16, 8)])
SHARES = st.sampled_from([0.25, 0.5, 0.999, 0.01, 1 / 3])
EACH = st.sampled_from([0.9, 0.5, 0.99]) | st.floats(0.0, 1.0)


@given(data=DATA, call=CALLS, share=SHARES, each_row=EACH, target=st.floats(0.0, 1.0))
def test_each_sampled_row_keeps_its_mass_and_each_head_its_mean(
    data: st.DataObject, call: sp.AttentionCall, share: float, each_row: float, target: float
) -> None:
    tile = data.draw(SIZES)
    plan = data.draw(st.just(sp.Plan(sp.SparseMask.empty(call, tile))) | plans(call))
    after = refined(sp.RecallFloor(target=target, rows=share, each_row=each_row), call, plan)
    assert not bool((whole(plan) & ~whole(after)).any())
    assert_reached(call, after, each_row)
    mean = after.notes["recall_after"]
    known = ~mean.isnan()
    assert bool((mean[known] >= target - CLOSE).all())
    assert bool((after.notes["recall_before"][known] <= mean[known] + CLOSE).all())


@given(call=CALLS, share=SHARES, each_row=st.floats(0.1, 0.99))
def test_no_tile_is_added_that_no_sampled_row_needs(call: sp.AttentionCall, share: float, each_row: float) -> None:
    """Without the smallest of what was added for it, a row would miss what it shall keep.

    Masses that differ by less than a thousandth are added together.
    """
    assume(call.starts is None)  # tiles of dense() are not on the grids of such rows
    plan = sp.Plan(sp.SparseMask.empty(call, 16))
    after = refined(sp.RecallFloor(target=0.0, rows=share, each_row=each_row), call, plan)
    sample = after.notes["recall_sample"]
    mass = torch.nn.functional.pad(dense(call), (0, -call.kv_len % 16))
    by_tile = mass.unflatten(-1, (-1, 16)).sum(-1)
    index = sample.rows[:, None, :, None].expand(-1, by_tile.shape[1], -1, by_tile.shape[3])
    rows = by_tile.gather(2, index)
    added = after.mask.tile_map()
    before = call.geometry.q_offset
    own = (sample.rows + before) // 16 - before // 16
    needed = torch.zeros_like(added)
    for b in range(rows.shape[0]):
        for h in range(rows.shape[1]):
            for n in range(rows.shape[2]):
                if not sample.real[b, n]:
                    continue
                tile, mass_of_row = int(own[b, n]), rows[b, h, n]
                largest = mass_of_row.sort(descending=True).values
                enough = int((largest.cumsum(0) < each_row + CLOSE).sum().clamp(max=len(largest) - 1))
                needed[b, h, tile] |= mass_of_row >= largest[enough] * (1 - 1e-3)
    assert not bool((added & ~needed).any())


@given(call=CALLS, a=st.floats(0.0, 1.0), b=st.floats(0.0, 1.0), share=SHARES)
def test_more_mass_takes_no_fewer_tiles(call: sp.AttentionCall, a: float, b: float, share: float) -> None:
    plan = sp.Plan(sp.SparseMask.empty(call, 16))
    few, many = (
        refined(sp.RecallFloor(target=0.0, rows=share, each_row=x), call, plan) for x in (min(a, b), max(a, b))
    )
    assert not bool((whole(few) & ~whole(many)).any())


@given(call=CALLS, share=SHARES)
def test_some_tiles_at_a_time_it_is_the_same(call: sp.AttentionCall, share: float) -> None:
    floor = sp.RecallFloor(target=0.95, rows=share, each_row=0.8)
    plan = sp.Plan(sp.SparseMask.empty(call, 16))
    at_once = refined(floor, call, plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_floor, "ENTRIES_ON_CPU", 1)
        patch.setattr(row_floor, "ENTRIES", 1)
        one = refined(floor, call, plan)
    difference = whole(at_once) ^ whole(one)
    assert float(difference.double().mean()) < 0.01  # ties alone, which rounding breaks
    torch.testing.assert_close(
        at_once.notes["recall_after"], one.notes["recall_after"], atol=1e-3, rtol=0, equal_nan=True
    )


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 127, 128, 129, 131])
@pytest.mark.parametrize("share", [0.25, 0.01, 0.9])
def test_which_rows_are_sampled(length: int, share: float) -> None:
    """One in so many of each tile, other ones from tile to tile; and the last row of all."""
    q, k, v = tensors("random", batch=1, heads=1, kv_heads=1, q_len=length, kv_len=length + 21, head_dim=8)
    call = sp.AttentionCall(q, k, v, q_offset=21)
    rows = row_floor.sampled(call.geometry, 16, share)
    stride = row_floor.stride_of(share, 16)
    assert stride == {0.25: 4, 0.01: 16, 0.9: 1}[share]
    positions = rows.position[rows.real].tolist()
    assert len(set(positions)) == len(positions)
    last = 20 + length
    expected = {p for p in range(21, last + 1) if p % 16 % stride == p // 16 % stride}
    if last not in expected:  # it takes the place of the last one of its tile
        expected = expected - {max((p for p in expected if p // 16 == last // 16), default=last)} | {last}
    assert set(positions) == expected
    assert (rows.index[rows.real] + 21).tolist() == positions
    assert (rows.own[rows.real] + 21 // 16).tolist() == [p // 16 for p in positions]


def test_a_single_row_that_looks_back_is_heard() -> None:
    """All others look at the first key; a few rows of the whole call miss it."""
    q, k = torch.zeros(1, 1, 1024, 16), torch.zeros(1, 1, 1024, 16)
    q[..., 1], k[0, 0, 0, 1] = 80.0, 1.0
    q[0, 0, 500, 0], q[0, 0, 500, 1], k[0, 0, 101, 0] = 80.0, 0.0, 1.0
    call = sp.AttentionCall(q, k, torch.randn(1, 1, 1024, 16))
    found = []
    floors: list[dict[str, Any]] = [{"target": 0.0, "rows": 0.999, "each_row": 0.5}, {"rows": 2}]
    for floor in floors:
        pipeline = sp.build("streaming", sink=64, window=64, block=64, recall=floor)
        mask = pipeline.run(call).mask.to_dense()[0, 0]
        found.append(bool(mask[500, 101]))
        assert not bool(mask[700, 101])
    assert found == [True, False]


def test_over_dense_plans_it_says_that_all_is_kept() -> None:
    q, k, v = tensors("random", batch=1, heads=2, kv_heads=1, q_len=70, kv_len=70, head_dim=8)
    result = sp.build("dense", recall={"rows": 0.25, "each_row": 0.9}).run(sp.AttentionCall(q, k, v))
    assert torch.equal(torch.ones(1, 2), result.plan.notes["recall_after"])
    assert float(result.plan.notes["recall_sample"].after.min()) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0.0}, r"rows is 0\.0: pass an integer from 1 to 65536, or a share of all rows above 0 and below 1"),
        ({"rows": 1.0}, r"rows is 1\.0: pass an integer"),
        ({"rows": True}, "rows is True: pass an integer"),
        ({"rows": 0.25, "each_row": 1.5}, r"each_row is 1\.5: pass a number from 0 to 1"),
        ({"each_row": 0.9}, r"each_row is 0\.9: it goes with rows as a share, such as 0\.25"),
        ({"rows": 0.25, "span": 128}, "span is 128: with rows as a share each query tile gets what its own rows need"),
        ({"rows": 0.25, "speaks_for": "tile"}, "speaks_for is 'tile': with rows as a share"),
        ({"rows": 0.25, "dense_from": 1.0}, r"dense_from is 1\.0: with rows as a share"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sp.ParameterError, match=message):
        sp.RecallFloor(**options)
    with pytest.raises(sp.ParameterError, match=r"recall\." + message):
        sp.build("bfla", recall=options)


def test_what_it_holds_at_most_is_told() -> None:
    """More rows, more to hold; and never as much as all logits."""
    q, k, v = tensors("random", batch=1, heads=2, kv_heads=1, q_len=4096, kv_len=4096, head_dim=8)
    call = sp.AttentionCall(q, k, v)
    floor = sp.RecallFloor(rows=0.25)
    assert 0 < floor.workspace(evolve(call, q=q[:, :, :128])) < floor.workspace(call)
