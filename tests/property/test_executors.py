"""Laws of executors: the plain softmax over any mask; tile size, cuts of the prompt and of the keys do not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from sparseprefill.call import AttentionCall
from sparseprefill.executors.cpu import CpuExecutor
from sparseprefill.executors.reference import ReferenceExecutor
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Carry, Plan, Result
from sparseprefill.stages import SparseExecutor
from sparseprefill.testing import attention, calls, masks
from sparseprefill.testing.truth import difference

EXECUTORS = (ReferenceExecutor(), CpuExecutor())
EACH = pytest.mark.parametrize("executor", EXECUTORS, ids=lambda one: type(one).__name__)
CALLS = calls(max_len=80, max_heads=4, max_batch=2, head_dims=(8, 16))
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DATA = st.data()


def agree(call: AttentionCall, expected: tuple[torch.Tensor, torch.Tensor], result: Result) -> None:
    for wanted, got in zip(expected, (result.out, result.lse), strict=True):
        assert difference(wanted, got, call.q.dtype) is None


def on_single_pairs(call: AttentionCall, keep: torch.Tensor) -> SparseMask:
    """A mask of 1 x 1 tiles that selects what `keep` ``[B, H, Nq, Nkv]`` does."""
    if call.starts is not None:  # columns of a mask are positions, those of `keep` are indices
        index = torch.arange(keep.shape[-1]) + call.starts[:, None]
        inside = (index < keep.shape[-1])[:, None, None]
        index = index.clamp(max=keep.shape[-1] - 1)[:, None, None].expand(keep.shape)
        keep = torch.gather(keep, -1, index) & inside
    return SparseMask.from_tiles(call, keep, 1, diagonal=False)


@EACH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=DATA)
def test_any_mask_is_a_plain_softmax(executor: SparseExecutor, dtype: torch.dtype, data: st.DataObject) -> None:
    call = data.draw(calls(max_len=80, max_heads=8, max_batch=2, head_dims=(8, 16), dtypes=(dtype,)))
    mask = data.draw(masks(call, diagonal=data.draw(st.booleans())))
    result = executor.execute(call, Plan(mask))
    agree(call, attention(call, mask.to_dense()), result)
    assert dtype == result.out.dtype
    assert (torch.float64 if dtype == torch.float64 else torch.float32) == result.lse.dtype


@EACH
@given(call=calls(max_len=40, max_heads=2, max_batch=2, head_dims=(8,)), data=DATA)
def test_output_does_not_depend_on_tile_size(
    executor: SparseExecutor, call: AttentionCall, data: st.DataObject
) -> None:
    mask = data.draw(masks(call))
    fine = on_single_pairs(call, mask.to_dense())
    assert torch.equal(mask.to_dense(), fine.to_dense())
    result = executor.execute(call, Plan(fine))
    agree(call, (result.out, result.lse), executor.execute(call, Plan(mask)))


@EACH
@given(call=CALLS, data=DATA)
def test_stripes_or_tiles_of_the_same_keys(executor: SparseExecutor, call: AttentionCall, data: st.DataObject) -> None:
    """The same columns for every row, once as stripes and once as tiles of one key."""
    column = torch.rand(call.k.shape[2], generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < 0.3
    tile, group = data.draw(st.sampled_from([8, 24])), data.draw(st.integers(1, 3))
    by_stripes = SparseMask.from_stripes(call, column[None], group, tile, diagonal=False)
    by_tiles = SparseMask.from_tiles(call, column[None], (tile, 1), diagonal=False)
    result = executor.execute(call, Plan(by_tiles))
    agree(call, (result.out, result.lse), executor.execute(call, Plan(by_stripes)))


@EACH
@given(call=CALLS, data=DATA)
def test_merged_parts_are_the_whole(executor: SparseExecutor, call: AttentionCall, data: st.DataObject) -> None:
    mask = data.draw(masks(call))
    key = torch.arange(call.k.shape[2])
    part = key < data.draw(st.integers(0, call.k.shape[2]), label="split")
    left, right = (on_single_pairs(call, mask.to_dense() & side) for side in (part, ~part))
    whole = executor.execute(call, Plan(mask))
    states = [executor.accumulate(call, Plan(side)) for side in (left, right)]
    for state in (states[0].merge(states[1]), states[1].merge(states[0])):
        out, lse = state.finish(call.sinks)
        agree(call, (whole.out, whole.lse), Result(out, lse, Plan(mask)))


@EACH
@given(call=CALLS, data=DATA)
def test_resuming_from_a_carry_is_the_whole(executor: SparseExecutor, call: AttentionCall, data: st.DataObject) -> None:
    whole = data.draw(masks(call))
    part = on_single_pairs(call, whole.to_dense() & (torch.arange(call.k.shape[2]) % 3 == 0))
    rest = on_single_pairs(call, whole.to_dense() & ~part.to_dense())
    plan = Plan(rest, Carry(executor.accumulate(call, Plan(part)), part))
    result = executor.execute(call, plan)
    agree(call, attention(call, whole.to_dense()), result)
    assert torch.equal(whole.to_dense(), result.mask.to_dense())


@EACH
@given(call=calls(max_len=80, max_heads=4, max_batch=2, head_dims=(8,), padding=("none", "right")), data=DATA)
def test_any_cut_of_the_prompt(executor: SparseExecutor, call: AttentionCall, data: st.DataObject) -> None:
    """The same pairs, computed in two chunks of queries that see the keys up to their end."""
    keep, q_len = data.draw(masks(call)).to_dense(), call.q.shape[2]
    offset = call.geometry.q_offset
    whole = executor.execute(call, Plan(on_single_pairs(call, keep)))
    cut = data.draw(st.integers(0, q_len), label="cut")
    parts = []
    for first, last in ((0, cut), (cut, q_len)):
        if first == last:
            continue
        end = offset + last
        lengths = None if call.lengths is None else call.lengths.clamp(max=end)
        rows = slice(first, last)
        fields: dict[str, Any] = {"q": call.q[:, :, rows], "k": call.k[:, :, :end], "v": call.v[:, :, :end]}
        chunk = evolve(call, q_offset=offset + first, lengths=lengths, **fields)
        parts.append(executor.execute(chunk, Plan(on_single_pairs(chunk, keep[:, :, rows, :end]))))
    out, lse = torch.cat([one.out for one in parts], 2), torch.cat([one.lse for one in parts], 2)
    agree(call, (whole.out, whole.lse), Result(out, lse, whole.plan))


@EACH
@given(call=CALLS, data=DATA)
def test_probe_is_the_mass_per_tile(executor: SparseExecutor, call: AttentionCall, data: st.DataObject) -> None:
    mask = data.draw(masks(call, tiles=(8, 24)))
    heads = torch.tensor(data.draw(st.lists(st.booleans(), min_size=call.q.shape[1], max_size=call.q.shape[1])))
    result = executor.execute(call, Plan(mask, probe=heads.expand(call.q.shape[0], -1)))
    keep, g = mask.to_dense(), call.geometry
    one_hot = evolve(call, v=torch.eye(g.kv_len).expand(g.batch, call.k.shape[1], -1, -1), sinks=None)
    weights = attention(one_hot, keep)[0]  # the attention matrix itself
    expected = torch.zeros(g.batch, g.heads, g.tile_rows(mask.tile_q), g.tile_columns(mask.tile_k), dtype=torch.float64)
    count = torch.zeros(expected.shape[:1] + expected.shape[2:3])
    row = g.query_positions() // mask.tile_q - g.first_tile(mask.tile_q)[:, None]
    column = (g.key_positions() // mask.tile_k).clamp(min=0)
    for b in range(g.batch):
        count[b].index_add_(0, row[b], g.real_queries()[b].float())
        by_row = torch.zeros(g.heads, g.kv_len, expected.shape[2], dtype=torch.float64)
        by_row.index_add_(2, row[b], weights[b].transpose(1, 2))
        expected[b].transpose(1, 2).index_add_(1, column[b], by_row)
    expected = expected / count.clamp(min=1)[:, None, :, None] * heads[:, None, None] * mask.tile_map()
    assert result.probe is not None
    assert difference(expected, result.probe, torch.float32) is None
