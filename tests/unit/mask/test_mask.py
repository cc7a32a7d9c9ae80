"""SparseMask: constructors, union, and what is refused."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from helpers.build import int32, make
from sparseprefill.errors import MaskError
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.testing import allowed_pairs

CALL = make(10, 12)


@pytest.mark.parametrize("tile", [1, 4, 5, (3, 128), 128])
def test_full_holds_every_allowed_pair(tile: int | tuple[int, int]) -> None:
    call = make(10, 12, batch=2, starts=int32(0, 5), window=6)
    mask = SparseMask.full(call, tile)
    assert torch.equal(allowed_pairs(call)[:, None].expand(-1, 2, -1, -1), mask.to_dense())
    assert 1.0 == mask.density
    mask.check()


def test_empty_holds_nothing() -> None:
    mask = SparseMask.empty(CALL)
    assert 0 == int(mask.to_dense().sum())
    assert 0.0 == mask.density


def test_geometry_serves_in_place_of_the_call() -> None:
    assert torch.equal(SparseMask.full(CALL, 4).to_dense(), SparseMask.full(CALL.geometry, 4).to_dense())


def test_tiles_keep_the_diagonal_unless_told() -> None:
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    with_own, without = (SparseMask.from_tiles(CALL, nothing, 4, diagonal=own) for own in (True, False))
    query, key = torch.arange(10)[:, None] + 2, torch.arange(12)
    assert torch.equal((query // 4 == key // 4) & (key <= query), with_own.to_dense()[0, 0])
    assert 0 == int(without.to_dense().sum())


def test_tiles_out_of_reach_are_dropped_from_the_lists() -> None:
    mask = SparseMask.from_tiles(CALL, torch.ones(3, 3, dtype=torch.bool), 4)
    assert mask.tiles is not None
    assert [1, 2, 3] == mask.tiles.counts[0, 0].tolist()


def test_stripe_is_one_column_of_its_group() -> None:
    keep = torch.zeros(2, 12, dtype=torch.bool)
    keep[1, 5] = True
    mask = SparseMask.from_stripes(CALL, keep, group=2, tile=4, diagonal=False)
    expected = torch.zeros(10, 12, dtype=torch.bool)
    expected[6:, 5] = True  # group 1 holds positions 8 and on: rows 6 and on
    assert torch.equal(expected, mask.to_dense()[0, 1])
    assert mask.stripe_density == mask.density


def test_maps_broadcast_over_batch_and_heads() -> None:
    per_head = torch.zeros(2, 1, 3, dtype=torch.bool)
    per_head[1] = True
    mask = SparseMask.from_tiles(CALL, per_head, 4)
    assert torch.equal(SparseMask.full(CALL, 4).to_dense()[:, 1], mask.to_dense()[:, 1])
    assert not torch.equal(mask.to_dense()[:, 0], mask.to_dense()[:, 1])


def test_ranges_are_the_same_for_every_head() -> None:
    first, last = torch.tensor([[[0, 2], [0, 1], [0, 2]]]), torch.tensor([[[1, 1], [0, 2], [1, 3]]])
    mask = SparseMask.from_ranges(CALL, first, last, 3, 4)
    assert mask.tiles is not None
    assert [[0], [1], [0, 2]] == [mask.tiles.row(0, 1, row).tolist() for row in range(3)]


def test_rows_of_the_dense_form() -> None:
    mask, rows = SparseMask.full(CALL, 4), torch.tensor([9, 0])
    assert torch.equal(mask.to_dense()[:, :, rows], mask.to_dense(rows))


def test_head_is_a_mask_of_its_own() -> None:
    call = make(10, 12, batch=2, starts=int32(0, 5))
    keep = torch.rand(2, 2, call.geometry.tile_rows(4), 3, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = SparseMask.from_tiles(call, keep, 4)
    assert torch.equal(mask.to_dense()[1:, 1:], mask.head(1, 1).to_dense())


def test_union_with_another_type_is_left_to_python() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        SparseMask.full(CALL) | 3  # type: ignore[operator]


@pytest.mark.parametrize("tile", [0, -4, 2.0, True, (4, 0), (4, -1), (4, 4, 4), (True, 4)])
def test_bad_tile_sizes(tile: Any) -> None:
    for build in (SparseMask.full, SparseMask.empty):
        with pytest.raises(MaskError, match=r"(tile is|SparseMask\.tile_q is).*positive number of tokens"):
            build(CALL, tile)


@pytest.mark.parametrize("group", [0, -1, 1.5])
def test_bad_group(group: Any) -> None:
    with pytest.raises(MaskError, match=r"group is .*pass a positive number"):
        SparseMask.from_stripes(CALL, torch.ones(1, 12, dtype=torch.bool), group=group)


def test_map_of_another_shape_or_dtype() -> None:
    with pytest.raises(MaskError, match=r"keep has shape \(2, 3\).*must broadcast to .*\(1, 2, 3, 3\)"):
        SparseMask.from_tiles(CALL, torch.ones(2, 3, dtype=torch.bool), 4)
    with pytest.raises(MaskError, match=r"keep is torch\.float32: pass a bool tensor"):
        SparseMask.from_tiles(CALL, torch.ones(3, 3), 4)
    with pytest.raises(MaskError, match="keep is list: pass a bool tensor"):
        SparseMask.from_stripes(CALL, [True])  # type: ignore[arg-type]
    with pytest.raises(MaskError, match="must broadcast"):
        SparseMask.from_tiles(CALL, torch.ones(1, 1, 1, 3, 3, dtype=torch.bool), 4)


def test_not_a_call() -> None:
    with pytest.raises(MaskError, match="made for an AttentionCall or its geometry, not for Tensor"):
        SparseMask.full(torch.zeros(1))  # type: ignore[arg-type]


def test_lists_of_another_shape() -> None:
    lists = IndexLists.from_map(torch.ones(1, 2, 4, 3, dtype=torch.bool))
    with pytest.raises(MaskError, match=r"SparseMask\.tiles has lists \(1, 2, 4\).*\(1, 2, 3\)"):
        SparseMask(CALL.geometry, 4, 4, lists)
    with pytest.raises(MaskError, match=r"SparseMask\.stripes has lists"):
        SparseMask(CALL.geometry, 4, 4, None, 2, lists)


def test_union_of_different_calls_names_both() -> None:
    with pytest.raises(MaskError, match=r"Nq=10, Nkv=12.*Nq=9, Nkv=12"):
        _ = SparseMask.full(CALL) | SparseMask.full(make(9, 12))


@pytest.mark.parametrize("indices", [[1, 0, 2], [0, 0, 2], [0, 1, 3], [-1, 0, 1]])
def test_check_reads_the_lists(indices: list[int]) -> None:
    mask = SparseMask.full(CALL, 4)
    assert mask.tiles is not None
    bad = evolve(mask, tiles=evolve(mask.tiles, indices=torch.tensor(indices, dtype=torch.int32)))
    with pytest.raises(MaskError, match="ascending, distinct indices from 0 to 2"):
        bad.check()


@pytest.mark.parametrize("kind", ["tiles", "stripes"])
@pytest.mark.parametrize("offset", [-1, -1000, 2, 1 << 40, (1 << 63) - 1])
def test_check_finds_lists_outside_their_indices(kind: str, offset: int) -> None:
    mask = SparseMask.full(CALL, 4) if kind == "tiles" else SparseMask.from_stripes(CALL, torch.ones(1, 12) > 0, 3, 4)
    lists = getattr(mask, kind)
    offsets = lists.offsets.clone()
    offsets[0, 1, -1] = lists.indices.numel() - 1 if offset == 2 else offset
    with pytest.raises(MaskError, match=rf"SparseMask\.{kind}: the list of .* head 1, .* must lie within the \d+ ind"):
        evolve(mask, **{kind: evolve(lists, offsets=offsets)}).check()


@pytest.mark.parametrize("count", [-1, 4, 1 << 30])
def test_check_finds_impossible_counts(count: int) -> None:
    mask = SparseMask.full(CALL, 4)
    assert mask.tiles is not None
    with pytest.raises(MaskError, match="ascending, distinct indices from 0 to 2"):
        evolve(mask, tiles=evolve(mask.tiles, counts=torch.full_like(mask.tiles.counts, count))).check()


def test_lists_without_entries_may_begin_anywhere() -> None:
    lists = IndexLists.empty(1, 2, 3, torch.device("cpu"))
    SparseMask(CALL.geometry, 4, 4, evolve(lists, offsets=lists.offsets - 7)).check()


def test_maps_of_more_dimensions_are_refused_whatever_their_size() -> None:
    with pytest.raises(MaskError, match=r"keep has shape \(1, 1, 2, 3, 3\): it must broadcast to .*\(1, 2, 3, 3\)"):
        SparseMask.from_tiles(CALL, torch.ones(1, 1, 2, 3, 3, dtype=torch.bool), 4)
    with pytest.raises(MaskError, match=r"keep has shape \(1, 1, 2, 3, 12\): it must broadcast"):
        SparseMask.from_stripes(CALL, torch.ones(1, 1, 2, 3, 12, dtype=torch.bool), tile=4)


RANGE = torch.zeros(1, 3, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("first", "last", "width", "message"),
    [
        (RANGE.float(), RANGE, 3, r"first is torch\.float32: pass an int64 tensor \[B, R, P\]"),
        (RANGE, RANGE.double(), 3, r"last is torch\.float64: pass an int64 tensor"),
        (RANGE, [0], 3, "last is list: pass an int64 tensor"),
        (RANGE[0], RANGE, 3, r"first has shape \(3, 1\): pass \[B, R, P\]"),
        (RANGE, RANGE[:, :2], 3, r"last has shape \(1, 2, 1\): pass first's"),
        (RANGE, RANGE, 2.5, r"width is 2\.5: pass the number of entries"),
    ],
)
def test_bad_ranges(first: Any, last: Any, width: Any, message: str) -> None:
    with pytest.raises(MaskError, match=message):
        SparseMask.from_ranges(CALL, first, last, width, 4)


@pytest.mark.parametrize("name", ["starts", "lengths"])
def test_union_of_calls_with_other_padding_names_both(name: str) -> None:
    one, other = (
        SparseMask.full(make(10, 12, batch=2, **dict[str, Any]({name: rows})), 4) for rows in (int32(0, 5), int32(4, 0))
    )
    with pytest.raises(MaskError, match=rf"different calls: .*{name}=\[0, 5\].*{name}=\[4, 0\]"):
        _ = one | other
    with pytest.raises(MaskError, match=rf"cannot subtract .*{name}="):
        _ = one - other


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([999], r"\[999\]"),
        ([-11], r"\[-11\]"),
        (torch.tensor([0, 10]), r"\[0, 10\]"),
        ([0.5], r"torch\.float32"),
        ([True], r"torch\.bool"),
        ([[0]], r"of shape \(1, 1\)"),
        (["first"], "'first'"),
    ],
)
def test_rows_that_are_none(rows: Any, shown: str) -> None:
    with pytest.raises(MaskError, match=rf"rows is .*{shown}.*: pass indices of query rows, integers from 0 to 9"):
        SparseMask.full(CALL, 4).to_dense(rows)


def test_rows_as_a_list() -> None:
    mask = SparseMask.full(CALL, 4)
    assert torch.equal(mask.to_dense()[:, :, [3, -1]], mask.to_dense([3, -1]))


@pytest.mark.parametrize("cells", [0, -1, 2.5, True])
def test_bad_cells(cells: Any) -> None:
    with pytest.raises(MaskError, match=r"cells is .*: pass a positive number of cells"):
        SparseMask.full(CALL, 4).shade(cells)


@pytest.mark.parametrize(("where", "name"), [((1, 0), "batch"), ((0, 2), "head"), ((0, -1), "head")])
def test_head_that_is_none(where: tuple[int, int], name: str) -> None:
    with pytest.raises(MaskError, match=rf"{name} is -?\d: pass an integer from 0 to"):
        SparseMask.full(CALL, 4).head(*where)
