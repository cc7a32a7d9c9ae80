"""CpuExecutor: what it hands to the reference, what it may hold, and the numbers of each way through it."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import sparseprefill as sp
from helpers.build import int32, make
from sparseprefill.executors import cpu
from sparseprefill.executors.cpu import CpuExecutor
from sparseprefill.plan import Carry, Kernel, Plan
from sparseprefill.testing import attention, calls, masks
from sparseprefill.testing.truth import difference

CPU, REFERENCE = CpuExecutor(), sp.ReferenceExecutor()


def equal(call: sp.AttentionCall, plan: Plan) -> None:
    expected, found = REFERENCE.execute(call, plan), CPU.execute(call, plan)
    for wanted, got in ((expected.out, found.out), (expected.lse, found.lse)):
        assert difference(wanted, got, call.q.dtype) is None
    assert (expected.probe is None) == (found.probe is None)
    if expected.probe is not None and found.probe is not None:
        torch.testing.assert_close(expected.probe, found.probe, atol=1e-5, rtol=1e-4)
    assert ("cpu",) == tuple(kernel.name for kernel in found.kernels)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 257])
@pytest.mark.parametrize("behind", [0, 1, 131])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_lengths_around_a_tile(length: int, behind: int, share: float) -> None:
    call = make(length, length + behind, heads=4, kv_heads=2)
    g, source = call.geometry, torch.Generator().manual_seed(0)
    keep = torch.rand(4, g.tile_rows(128), g.tile_columns(128), generator=source) <= share
    equal(call, Plan(sp.SparseMask.from_tiles(call, keep)))


@pytest.mark.parametrize("grid", [(16, 16), (32, 16), (16, 32), (24, 20)])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 21}, {"softcap": 1.5}, {"starts": int32(0, 9), "lengths": int32(70, 33)}, {"sinks": torch.ones(4)}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_tiles_and_stripes_with_probes(grid: tuple[int, int], options: dict[str, Any]) -> None:
    call = make(70, 90, batch=2, heads=4, kv_heads=2, **options)
    g, source = call.geometry, torch.Generator().manual_seed(1)
    keep = torch.rand(2, 4, g.tile_rows(grid[0]), g.tile_columns(grid[1]), generator=source) < 0.4
    columns = torch.rand(2, 4, g.tile_rows(2 * grid[0]), 90, generator=source) < 0.2
    tiles = sp.SparseMask.from_tiles(call, keep, grid)
    both = tiles | sp.SparseMask.from_stripes(call, columns, 2, grid, diagonal=False)
    probe = torch.tensor([[True, False, True, True], [False, False, True, False]])
    for mask in (tiles, both, sp.SparseMask.full(call, grid), sp.SparseMask.empty(call, grid)):
        equal(call, Plan(mask, probe=probe))


def test_a_probed_tile_of_which_some_rows_see_nothing() -> None:
    """Of rows 8 to 15 those from 13 on see no key of tile 0 in their window, and have no other tile."""
    call = make(24, window=6)
    plan = square(call, (1, 0), tile=8)
    found = CPU.execute(call, evolve(plan, probe=torch.ones(1, 2, dtype=torch.bool)))
    assert found.probe is not None
    assert pytest.approx([5 / 8, 5 / 8]) == found.probe[0, :, 1, 0].tolist()
    equal(call, found.plan)


@given(data=st.data())
def test_states_are_those_of_the_reference(data: st.DataObject) -> None:
    """Maximum, sum and values, not only what comes of them: methods compare logits with a row's maximum."""
    call = data.draw(calls(max_len=70, max_heads=4, max_batch=2, head_dims=(8,), dtypes=(torch.float64,)))
    plan = Plan(data.draw(masks(call, diagonal=data.draw(st.booleans()))))
    expected, found = REFERENCE.accumulate(call, plan), CPU.accumulate(call, plan)
    for name in ("m", "l", "acc"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -2.0])])
def test_a_carry_is_resumed(sinks: torch.Tensor | None) -> None:
    call = make(48, sinks=sinks)
    rows = torch.arange(6)
    region = sp.SparseMask.from_tiles(call, (rows[:, None] - rows == 1)[None, None], 8, diagonal=False)
    rest = sp.SparseMask.from_tiles(call, (rows[:, None] - rows != 1)[None, None], 8)
    carry = Carry(REFERENCE.accumulate(call, Plan(region)), region)
    equal(call, Plan(rest, carry))
    whole = attention(call, (region | rest).to_dense())
    assert difference(whole[0], CPU.execute(call, Plan(rest, carry)).out, call.q.dtype) is None


@given(data=st.data(), held=st.sampled_from([1, 3000]))
def test_pieces_of_any_size_give_the_same(data: st.DataObject, held: int) -> None:
    call = data.draw(calls(max_len=70, max_heads=4, max_batch=2, head_dims=(8,), dtypes=(torch.float64,)))
    plan = Plan(data.draw(masks(call)))
    expected = CPU.execute(call, plan)
    with patch.object(cpu, "GATHERED", held), patch.object(cpu, "COLUMNS", held // 100):
        found = CPU.execute(call, plan)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-10, atol=1e-10)


@given(data=st.data(), joined=st.sampled_from([0, 2, 9]))
def test_short_lists_and_dense_rows_are_computed_at_once(data: st.DataObject, joined: int) -> None:
    """Every way of putting tiles together, forced upon calls that are too small for it."""
    call = data.draw(calls(max_len=70, max_heads=4, max_batch=2, head_dims=(8,), dtypes=(torch.float64,)))
    mask = data.draw(masks(call))
    if data.draw(st.booleans()):
        mask = mask.with_dense_rows((data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9))))
    plan = Plan(mask, probe=torch.ones(call.q.shape[:2], dtype=torch.bool))
    with patch.object(cpu, "RUN", 1), patch.object(cpu, "JOINED", joined):
        equal(call, plan)


def test_dense_rows_are_calls_of_their_own() -> None:
    """One for each run of query tiles of a head that have every key in reach; their tiles are computed nowhere else."""
    call = make(44, 60, heads=4, kv_heads=2)
    keep = torch.zeros(1, 4, 6, 8, dtype=torch.bool)
    keep[0, 1, 1:3] = keep[0, 2, 5] = keep[0, 3] = True
    plan = Plan(sp.SparseMask.from_tiles(call, keep, 8))
    with patch.object(cpu, "RUN", 1):
        found = fused(call, plan)
    # Rows 8 to 23 of one head behind 24 keys, the last 4 of another behind 56, and all of a third behind 16.
    alone = [(1, 4, 4), (1, 4, 56), (1, 16, 16), (1, 16, 24), (1, 44, 16), (1, 44, 44)]
    assert [*alone, (15, 8, 8)] == found
    assert all(rows == 8 for _, rows, _ in fused(call, plan)), "too little work"


@pytest.mark.parametrize("together", [8, 16, 64])
@pytest.mark.parametrize("options", [{}, {"window": 29}, {"softcap": 1.5}, {"starts": int32(0, 9)}])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_query_tiles_that_share_their_stripes(width: int, together: int, options: dict[str, Any]) -> None:
    """Neighbours with one list are computed together, but for keys that only some of their rows see."""
    call = make(90, 101, batch=2, heads=4, kv_heads=2, **options)
    source = torch.Generator().manual_seed(2)
    columns = torch.rand(2, 4, *call.geometry.map_shape(5 * 8, width)[2:], generator=source) < 0.3
    columns[:, 1, 1] = False
    mask = sp.SparseMask.from_stripes(call, columns, 5, 8, width=width, diagonal=False)
    with patch.object(cpu, "TOGETHER", together):
        equal(call, Plan(evolve(mask, disjoint=True)))
        equal(call, Plan(evolve(mask, disjoint=True).regrouped(1)))
        equal(call, Plan(mask))


def test_values_of_another_size_than_the_keys() -> None:
    q, k, v = torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 4)
    call = sp.AttentionCall(q, k, v)
    equal(call, Plan(sp.SparseMask.full(call, 16)))


@pytest.mark.parametrize("layout", ["token-major", "keys of a longer cache", "one KV head of a slice"])
def test_strides(layout: str) -> None:
    q, k, v = (torch.randn(1, 96, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    if layout == "keys of a longer cache":
        k, v = (torch.cat([x, x], 2)[:, :, :96] for x in (k, v))
    if layout == "one KV head of a slice":
        k, v = (torch.randn(1, 1, 96, 32)[..., :16] for _ in "kv")
    call = sp.AttentionCall(q, k, v)
    keep = torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    equal(call, Plan(sp.SparseMask.from_tiles(call, keep, 16)))


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "not finite"), (float("-inf"), "not finite"), (1e30, "may overflow")]
)
def test_what_the_reference_computes_is_told(value: float, words: str) -> None:
    call = make(24)
    k = call.k.clone()
    k[0, 0, 5, 2] = value
    call = evolve(call, k=k, q=call.q * 1e9)
    result = CPU.execute(call, Plan(sp.SparseMask.full(call, 8)))
    (kernel,) = result.kernels
    assert "reference" == kernel.name
    assert words in kernel.reason
    assert (Kernel("cpu"),) == CPU.execute(make(24), Plan(sp.SparseMask.full(make(24), 8))).kernels


def test_gradients_are_those_of_the_reference() -> None:
    call = make(40, heads=4, kv_heads=2)
    keep = torch.rand(1, 4, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    plan, found = Plan(sp.SparseMask.from_tiles(call, keep, 8)), []
    for executor in (REFERENCE, CPU):
        q = call.q.clone().requires_grad_()
        result = executor.execute(evolve(call, q=q), plan)
        result.out.square().sum().backward()
        assert q.grad is not None
        found.append(q.grad)
    assert torch.equal(*found)
    assert "gradients" in result.kernels[0].reason


def test_another_device_is_refused() -> None:
    q = torch.empty(1, 2, 8, 8, device="meta")
    call = sp.AttentionCall(q, q, q)
    assert "q is on meta; move q, k and v to the CPU, or use AutoExecutor" == CPU.unsupported(call)
    with pytest.raises(sp.UnsupportedCallError, match="CpuExecutor: q is on meta"):
        CPU.execute(call, Plan(sp.SparseMask.empty(call)))


def test_what_it_may_hold_grows_with_the_call_up_to_what_is_gathered() -> None:
    few, some, many = (CPU.workspace(make(n, heads=4, kv_heads=2)) for n in (64, 4096, 8192))
    assert few < some < many
    assert many < 4 * some


@pytest.mark.parametrize("how", ["execute", "accumulate"])
@pytest.mark.parametrize("kind", ["tiles", "dense heads", "stripes", "shared stripes"])
def test_what_it_holds_stays_below_what_it_says(kind: str, how: str) -> None:
    call = sp.AttentionCall(*(torch.randn(1, heads, 2048, 64) for heads in (4, 2, 2)))
    source = torch.Generator().manual_seed(0)
    tiles = torch.rand(4, 16, 16, generator=source) < 0.5
    tiles[:3] |= kind == "dense heads"
    mask = sp.SparseMask.from_tiles(call, tiles)
    if kind.endswith("stripes"):
        shared = kind.startswith("shared")
        columns = torch.rand(4, 1, 2048, generator=source) < 0.5
        mask = sp.SparseMask.from_stripes(call, columns, 16, diagonal=not shared)
        mask = evolve(mask, disjoint=shared)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        getattr(CPU, how)(call, Plan(mask))
    held = most = 0
    profiler: Any = seen.profiler
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 0 < most < CPU.workspace(call)


def test_the_batches_of_lists() -> None:
    """Of about the same length together, the longest first; every entry once."""
    counts = torch.tensor([3, 40, 38, 1, 3])
    found = list(cpu._batches(counts, 4))
    assert [[1, 2], [0, 4], [3]] == [items.tolist() for items, _, _ in found]
    taken = [index if real is None else index[real] for _, index, real in found]
    assert sorted(torch.cat([one.flatten() for one in taken]).tolist()) == list(range(85))
    assert [False, True, True] == [real is None for _, _, real in found]
    first = found[0][1][1]
    assert list(range(43, 81)) == first[:38].tolist()


def test_methods_name_it() -> None:
    result = sp.build("streaming").run(make(300, heads=4, kv_heads=2))
    assert (Kernel("cpu"),) == result.kernels


def test_half_precision_needs_the_room_of_what_it_is_computed_in() -> None:
    call = make(512)
    half = evolve(call, q=call.q.bfloat16(), k=call.k.bfloat16(), v=call.v.bfloat16())
    assert CPU.workspace(call) == CPU.workspace(half)


def fused(call: sp.AttentionCall, plan: Plan) -> list[tuple[int, int, int]]:
    """What is computed at once by PyTorch's kernel: so many lists, of so many query rows and keys."""
    seen, run = [], cpu._fused

    def spy(q: torch.Tensor, k: torch.Tensor, *rest: Any, **more: Any) -> Any:
        seen.append((q.shape[0], q.shape[2], k.shape[2]))
        return run(q, k, *rest, **more)

    with patch.object(cpu, "_fused", spy):
        equal(call, plan)
    return sorted(seen)


def square(call: sp.AttentionCall, *tiles: tuple[int, int], tile: int | tuple[int, int] = 16) -> Plan:
    """A mask of these tiles of both heads, without diagonal ones but for those that are among them."""
    rows, columns = (tile, tile) if isinstance(tile, int) else tile
    keep = torch.zeros(1, 1, call.geometry.tile_rows(rows), call.geometry.tile_columns(columns), dtype=torch.bool)
    for at in tiles:
        keep[(0, 0, *at)] = True
    return Plan(sp.SparseMask.from_tiles(call, keep, tile, diagonal=False))


DIAGONAL = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5))


def test_diagonal_tiles_of_short_lists_are_computed_with_the_others() -> None:
    """Of both heads at once; a list of the diagonal tile alone is one causal call, and a long list is two."""
    call = make(96)
    assert [(12, 16, 16)] == fused(call, square(call, *DIAGONAL))
    assert [(4, 16, 32), (8, 16, 16)] == fused(call, square(call, *DIAGONAL, (3, 0), (4, 1)))
    others = ((1, 0), (2, 0), (3, 0)), ((4, 1), (4, 2), (5, 0), (5, 1))
    found = fused(call, square(call, *DIAGONAL[:4], *others[0], *others[1]))
    assert [(2, 16, 16), (4, 16, 32), (6, 16, 32)] == found, "without a diagonal tile they are lists like others"
    plan = square(call, *DIAGONAL, (3, 0), (5, 0), (5, 1), (5, 2))
    for joined, expected in (
        (2, [(2, 16, 32), (2, 16, 48), (10, 16, 16)]),
        (4, [(2, 16, 32), (2, 16, 64), (8, 16, 16)]),
        (3, [(2, 16, 32), (2, 16, 48), (10, 16, 16)]),
    ):
        with patch.object(cpu, "JOINED", joined):
            assert expected == fused(call, plan)


def test_tiles_that_are_not_square_or_have_a_window_are_computed_apart() -> None:
    call = make(96)
    wide = square(call, (0, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 4), tile=(32, 16))
    assert [(2, 32, 16), (2, 32, 32), (6, 32, 16)] == fused(call, wide)
    near = evolve(call, window=40)
    assert [(4, 16, 16), (12, 16, 16)] == fused(near, square(near, *DIAGONAL, (1, 0), (3, 2)))
    assert [(2, 16, 16), (2, 16, 16), (12, 16, 16)] == fused(near, square(near, *DIAGONAL, (1, 0), (3, 1), (4, 0)))


def test_a_few_rows_of_a_long_prompt_are_enough_work_for_a_call_of_their_own() -> None:
    """A head that sees all is computed without gathering its keys; it is the pairs that count."""
    call = make(64, 16448)
    keep = torch.zeros(1, 2, 2, 514, dtype=torch.bool)
    keep[:, 0] = keep[:, 1, :, :2] = True
    found = fused(call, Plan(sp.SparseMask.from_tiles(call, keep, 32)))
    assert [(1, 64, 64), (1, 64, 16384), (2, 32, 96)] == found


def test_a_row_of_a_batch_has_the_tiles_that_it_touches() -> None:
    """Not those of the longest one."""
    call = make(70, 90, batch=3, starts=int32(0, 9, 80), lengths=int32(90, 33, 10))
    mask = sp.SparseMask.full(call, (32, 16))
    rows = [cpu._Row.of(call, mask, b) for b in range(3)]
    assert [(2, 3, 6), (2, 2, 3), (2, 1, 1)] == [tuple(row.tiles.shape) for row in rows if row is not None]


@pytest.mark.parametrize("window", [None, 1, 16, 21, 64])
@pytest.mark.parametrize("grid", [(16, 16), (32, 16), (16, 32), (24, 20), (5, 16)])
def test_which_tiles_are_seen_by_all_rows_and_which_by_some(grid: tuple[int, int], window: int | None) -> None:
    call = make(96, window=window)
    row = cpu._Row.of(call, sp.SparseMask.full(call, grid), 0)
    assert row is not None
    distance = row.tile_starts()[:, None] - torch.arange(row.tiles.shape[2]) * grid[1]
    apart = torch.arange(row.tiles.shape[1] * grid[0])[:, None] - torch.arange(row.tiles.shape[2] * grid[1])
    seen = (apart >= 0) & (apart < (window or 1000))
    assert torch.equal(seen, row.seen(apart))
    cells = seen.unflatten(1, (-1, grid[1])).unflatten(0, (-1, grid[0]))
    assert torch.equal(cells.all(3).all(1), row.full(distance, grid[1], grid[0]))
    assert torch.equal(cells.any(3).any(1), row.near(distance, grid[1], grid[0]))


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}], ids=["fused", "held"])
@pytest.mark.parametrize("bytes_held", [1, 2048, 6000])
def test_pieces_gather_no_more_than_they_may(options: dict[str, Any], bytes_held: int) -> None:
    """But for one list, which is not cut."""
    call = make(160, heads=4, kv_heads=2, **options)
    source = torch.Generator().manual_seed(3)
    tiles = sp.SparseMask.from_tiles(call, torch.rand(1, 4, 10, 10, generator=source) < 0.5, 16)
    columns = torch.rand(1, 4, 5, 160, generator=source) < 0.1
    stripes = sp.SparseMask.from_stripes(call, columns, 2, 16, diagonal=False)
    seen, gather = list[tuple[int, int]](), cpu._Row.gather

    def spy(row: Any, name: str, index: torch.Tensor, width: int) -> torch.Tensor:
        found = gather(row, name, index, width)
        seen.append((found.shape[0], found.nbytes))
        return found

    with patch.object(cpu, "GATHERED", bytes_held), patch.object(cpu._Row, "gather", spy):
        for mask, skip in ((tiles, None), (stripes, None), (tiles | stripes, torch.tensor([0.01]))):
            CPU.execute(call, Plan(mask, skip_below=skip))
            assert seen
            assert all(lists == 1 or nbytes <= bytes_held for lists, nbytes in seen)
            seen.clear()


def test_numbers_of_twice_the_size_need_twice_the_room() -> None:
    """But for maps and lists."""
    few, many = make(16, 1 << 17), make(16, 1 << 17, dtype=torch.float64)
    assert 1.8 < CPU.workspace(many) / CPU.workspace(few) < 2


@pytest.mark.parametrize(("together", "rows"), [(7, 8), (8, 8), (16, 16), (24, 16), (32, 32), (64, 32)])
def test_so_many_rows_gather_their_shared_stripes_together(together: int, rows: int) -> None:
    """A power of two of neighbouring query tiles, as many as there are rows for."""
    call = make(32, 96)
    columns = torch.zeros(1, 2, 1, 96, dtype=torch.bool)
    columns[..., 3:60:5] = True
    mask = evolve(sp.SparseMask.from_stripes(call, columns, 4, 8, diagonal=False), disjoint=True)
    with patch.object(cpu, "TOGETHER", together):
        assert [(2 * 32 // rows, rows, 12)] == fused(call, Plan(mask))


@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "scale", "name"),
    [
        (torch.float32, 1e18, 1e18, 1.0, "cpu"),
        (torch.float32, 1e18, 1e18, 0.1, "cpu"),
        (torch.float32, 1e18, 1e18, 50.0, "reference"),
        (torch.float32, 1e18, -8e18, 1.0, "reference"),
        (torch.float32, -8e18, 1e18, 0.1, "reference"),
        (torch.float32, 8e18, 8e18, 1e-20, "reference"),
        (torch.float32, 1e-18, 1e36, 1.0, "cpu"),
        (torch.float64, 8e18, 8e18, 50.0, "cpu"),
        (torch.float64, 1e154, 1e154, 1.0, "reference"),
    ],
)
def test_products_that_overflow_are_left_to_the_reference(
    dtype: torch.dtype, queries: float, keys: float, scale: float, name: str
) -> None:
    """Of q and k alone, or with the scale; of 8 numbers each, one of which is large."""
    call = make(24, dtype=dtype)
    q, k = call.q.clamp(-1, 1) * abs(queries) / 10, call.k.clamp(-1, 1) * abs(keys) / 10
    q[0, 1, 3, 2], k[0, 0, 5, 2] = queries, keys
    call = evolve(call, q=q, k=k, scale=scale)
    (kernel,) = CPU.execute(call, Plan(sp.SparseMask.full(call, 8))).kernels
    assert (name, name == "reference") == (kernel.name, "may overflow" in kernel.reason)


@pytest.mark.parametrize(("last", "masked"), [(63, {False}), (64, {False}), (65, {False, True}), (90, {False, True})])
def test_keys_that_every_row_sees_need_no_mask(last: int, masked: set[bool]) -> None:
    """Query rows 64 to 95; a stripe behind their first one is seen by some."""
    call = make(32, 96)
    columns = torch.zeros(1, 2, 1, 96, dtype=torch.bool)
    columns[..., [3, 8, last]] = True
    mask = evolve(sp.SparseMask.from_stripes(call, columns, 4, 8, diagonal=False), disjoint=True)
    masked_calls, run = list[bool](), cpu._fused

    def spy(*tensors: Any, seen: torch.Tensor | None = None, causal: bool = False) -> Any:
        masked_calls.append(seen is not None)
        return run(*tensors, seen=seen, causal=causal)

    with patch.object(cpu, "_fused", spy):
        equal(call, Plan(mask))
    assert masked == set(masked_calls)
