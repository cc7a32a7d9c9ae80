"""ReferenceExecutor: what it holds, the mass of probed tiles, and values that are no numbers."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparseprefill as sp
from helpers.build import int32, make
from sparseprefill.executors.reference import ReferenceExecutor, _tiles, weigh
from sparseprefill.testing import allowed_pairs

CALL = make(20, 27, batch=2, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 4), (torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)]
)
def test_what_it_may_hold(dtype: torch.dtype, size: int) -> None:
    """Rows of a state: output, maximum and sum, four times over."""
    call = make(20, 27, batch=2, heads=4, kv_heads=2, dtype=dtype)
    assert 2 * 4 * 20 * (8 + 2) * 4 * size == ReferenceExecutor().workspace(call)
    assert ReferenceExecutor().unsupported(call) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision_of_the_state(dtype: torch.dtype) -> None:
    call = make(8, dtype=dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    state = ReferenceExecutor().accumulate(call, sp.Plan(sp.SparseMask.full(call, 4)))
    assert {exact} == {state.m.dtype, state.l.dtype, state.acc.dtype}
    result = ReferenceExecutor().execute(call, sp.Plan(sp.SparseMask.full(call, 4)))
    assert (dtype, exact, None) == (result.out.dtype, result.lse.dtype, result.probe)


@pytest.mark.parametrize("options", [{}, {"starts": int32(0, 6)}, {"window": 9}, {"softcap": 0.7}, {"scale": 0.2}])
@pytest.mark.parametrize("grid", [(8, 8), (4, 8), (8, 4)])
def test_the_mass_of_probed_tiles(options: dict[str, Any], grid: tuple[int, int]) -> None:
    """The share of the softmax that a tile of keys has, averaged over the tile's real rows."""
    call = make(20, 27, batch=2, heads=4, kv_heads=2, **options)
    geometry = call.geometry
    keep = torch.rand(geometry.tile_rows(grid[0]), geometry.tile_columns(grid[1]),
                      generator=torch.Generator().manual_seed(3)) < 0.6  # fmt: skip
    mask = sp.SparseMask.from_tiles(call, keep, grid)
    probe = torch.tensor([[True, False, True, False], [False, False, True, True]])
    found = ReferenceExecutor().execute(call, sp.Plan(mask, probe=probe))
    assert found.probe is not None
    assert (torch.float32, mask.tile_map().shape) == (found.probe.dtype, found.probe.shape)
    logits = call.q.double() @ call.k.double().repeat_interleave(2, 1).mT * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    p = torch.nan_to_num(torch.softmax(logits.masked_fill(~mask.to_dense(), -torch.inf), -1))
    query, key, real = geometry.query_positions(), geometry.key_positions(), allowed_pairs(call).any(-1)
    tiles, selected = geometry.tiles(grid[0]), mask.tile_map()
    for b in range(2):
        for r, tile in enumerate(tiles[b].tolist()):
            rows = (query[b] // grid[0] == tile) & real[b]
            for c in range(selected.shape[3]):
                mass = torch.nan_to_num(p[b, :, rows][..., key[b] // grid[1] == c].sum(-1).mean(-1))  # of no rows: 0
                expected = torch.where(probe[b] & selected[b, :, r, c], mass, 0.0)
                torch.testing.assert_close(expected.float(), found.probe[b, :, r, c], atol=1e-5, rtol=1e-4)


def test_stripes_take_no_mass_from_the_tiles() -> None:
    call = make(16)
    stripes = (torch.arange(16) < 4)[None].expand(4, 16)
    mask = sp.SparseMask.from_stripes(call, stripes, tile=4)
    probe = ReferenceExecutor().execute(call, sp.Plan(mask, probe=torch.ones(1, 2) > 0)).probe
    assert probe is not None
    assert torch.equal(mask.tile_map(), probe > 0)
    assert bool((probe.sum(-1)[..., 1:] < 1).all())


def test_a_head_that_is_not_asked_for_is_passed_over() -> None:
    heads = torch.tensor([[True, False, False, True], [False, True, False, False]])
    plan = sp.Plan(sp.SparseMask.full(CALL, 16))
    found = {(b, h) for (b, h, _), *_ in _tiles(CALL, plan, torch.float32, heads)}
    assert {(0, 0), (0, 3), (1, 1)} == found


def test_keys_that_follow_one_another_are_a_slice() -> None:
    """And those that do not are indices; keys ascend, each once, wherever lists overlap."""
    call = make(16, batch=2, starts=int32(0, 3))
    columns = torch.zeros(1, 16, dtype=torch.bool)
    columns[0, [0, 1, 9]] = True
    for mask, kind in (
        (sp.SparseMask.full(call, 8), slice),
        (sp.SparseMask.from_stripes(call, columns, group=2, tile=8, diagonal=False), torch.Tensor),
        (sp.SparseMask.from_stripes(call, columns, group=2, tile=8), None),
    ):
        dense = mask.to_dense()
        for (b, h, rows), keys, logits, keep in _tiles(call, sp.Plan(mask), torch.float32):
            index = torch.arange(16)[keys]
            assert kind is None or kind is slice or isinstance(keys, torch.Tensor) or len(index) <= 2
            assert kind is not slice or isinstance(keys, slice)
            assert bool((index.diff() > 0).all())
            assert torch.equal(dense[b, h, rows][:, index], keep)
            assert torch.equal(keep, logits > -torch.inf)
            outside = torch.ones(16, dtype=torch.bool).index_fill(0, index, False)
            assert not bool(dense[b, h, rows][:, outside].any())


def test_an_empty_selection_has_no_tiles() -> None:
    for mask in (
        sp.SparseMask.empty(CALL, 8),
        sp.SparseMask.from_stripes(CALL, torch.zeros(1, 27) > 0, group=9, tile=8, diagonal=False),
    ):
        assert [] == list(_tiles(CALL, sp.Plan(mask), torch.float32))
        result = ReferenceExecutor().execute(CALL, sp.Plan(mask))
        assert (0.0, True) == (float(result.out.abs().sum()), bool((result.lse == -torch.inf).all()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_reaches_only_rows_that_see_it(bad: float) -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    v = torch.tensor([[1.0, 2.0], [3.0, bad], [5.0, 6.0]])
    keep = torch.tensor([[True, True, False], [True, False, True]])
    found = weigh(p, v, keep)
    torch.testing.assert_close(found[:, 0], p @ v[:, 0])
    torch.testing.assert_close(found[0, 1], torch.tensor(0.5 * 2 + 0.5 * bad), equal_nan=True)
    torch.testing.assert_close(found[1, 1], torch.tensor(0.2 * 2 + 0.5 * 6))


def test_two_values_that_are_no_numbers() -> None:
    p, keep = torch.tensor([[0.5, 0.25, 0.25]]), torch.ones(1, 3, dtype=torch.bool)
    v = torch.tensor([[torch.inf, 1.0, 2.0], [-torch.inf, torch.nan, 3.0], [1.0, 1.0, torch.inf]])
    found = weigh(p, v, keep)[0]
    assert [True, True, False] == torch.isnan(found).tolist()
    assert torch.inf == float(found[2])
