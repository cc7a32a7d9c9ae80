"""SparseMask: constructors, union, and what is refused."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from helpers.build import int32, make, random_mask
from sparseprefill.errors import MaskError
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask, _row_chunks
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


def test_dense_rows_around_stripes_hold_no_stripe_in_a_tile() -> None:
    """So an executor need not ask; tiles that a stripe of the other mask runs through are stripes now."""
    call = make(40)
    keep = torch.zeros(1, 1, 5, 40, dtype=torch.bool)
    keep[..., 11] = True
    found = SparseMask.empty(call, 8).with_dense_rows((3, 4), SparseMask.from_stripes(call, keep, 1, 8, diagonal=False))
    expected = torch.arange(40) <= torch.arange(24, 32)[:, None]
    expected[:, 11] = False
    assert torch.equal(expected.expand(1, 2, -1, -1), found.to_dense(range(24, 32)))
    assert not bool(found.to_dense([*range(24), *range(32, 40)]).any())
    assert found.stripes is not None
    assert found.disjoint


def test_tiles_are_once_more_a_bitmap_where_stripes_may_lie_in_them() -> None:
    both = random_mask(CALL, "both", (4, 4), 1, seed=0)
    assert both.bitmap is not None
    assert torch.equal(both.tile_map().to(torch.uint8), both.bitmap)
    for kind in ("tiles", "stripes"):
        assert random_mask(CALL, kind, (4, 4), 1, seed=0).bitmap is None
    assert evolve(both, disjoint=True).bitmap is None


def test_tiles_have_128_tokens_unless_told() -> None:
    every = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    first, last = torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.int64)
    for mask in (
        *(SparseMask.empty(CALL), SparseMask.full(CALL), SparseMask.from_ranges(CALL, first, last, 1)),
        *(SparseMask.from_tiles(CALL, every), SparseMask.from_stripes(CALL, every), SparseMask.from_rules(CALL)),
    ):
        assert (128, 128, 1, 1) == (mask.tile_q, mask.tile_k, mask.group, mask.stripe_width)


def test_a_picture_looks_at_so_many_pairs_at_a_time() -> None:
    """Rows of 2 batch rows, 2 heads and 12 keys."""
    geometry = make(10, 12, batch=2).geometry
    for pairs, expected in ((4 * 48, [4, 4, 2]), (1, [1] * 10), (1 << 24, [10])):
        assert expected == [len(rows) for rows in _row_chunks(geometry, 1, pairs)]


def test_rows_as_a_list() -> None:
    mask = SparseMask.full(CALL, 4)
    assert torch.equal(mask.to_dense()[:, :, [3, -1]], mask.to_dense([3, -1]))
