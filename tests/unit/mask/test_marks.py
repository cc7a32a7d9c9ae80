"""What masks and lists say about themselves, at the edges: sizes, text, pictures, memory, which heads are alike."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch.nn import functional

import sparseprefill as sp
from helpers.build import int32, make
from sparseprefill.errors import MaskError
from sparseprefill.mask import count
from sparseprefill.mask import mask as masks
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.samples import stripes_at
from sparseprefill.mask.tile_map import Random, Stride, TileMap

CALL = make(10, 12)


def bits(*shape: int, seed: int = 0, share: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def test_lists_made_for_all_heads_say_so() -> None:
    geometry = CALL.geometry
    first = torch.zeros(1, 3, 1, dtype=torch.int64)
    full, ranges = IndexLists.full(geometry, 4, 4), IndexLists.from_ranges(first, first + 2, 2, 3)
    assert (True, True, True) == (full.same_heads, ranges.same_heads, full[:1, 1:2].same_heads)
    assert (True, False) == (full.for_group(2).same_heads, IndexLists.from_map(bits(1, 2, 3, 3)).same_heads)
    assert not IndexLists.empty(1, 2, 3, torch.device("cpu")).same_heads


def test_full_lists_are_made_once_for_calls_of_the_same_sizes() -> None:
    full, again, other = (IndexLists.full(make(*sizes).geometry, 4, 4) for sizes in ((10, 12), (10, 12), (9, 12)))
    assert full.counts is again.counts
    assert full.indices is again.indices
    assert full.counts is not other.counts
    padded = [IndexLists.full(make(10, 12, starts=int32(3)).geometry, 4, 4) for _ in range(2)]
    assert padded[0].counts is not padded[1].counts, "starts may hold anything"
    assert full.whole
    assert padded[0].whole
    assert not IndexLists.from_map(bits(1, 2, 3, 3)).whole


def test_storage_of_lists() -> None:
    """A full mask is one run of numbers, ranges have a row of storage for each list, and a map's lists no gaps."""
    geometry = CALL.geometry
    full = IndexLists.full(geometry, 4, 4)
    assert [0, 1, 2] == full.indices.tolist()
    assert [[[1, 2, 3]] * 2] == full.counts.tolist()
    assert [[[0, 0, 0]] * 2] == full.offsets.tolist()
    first = torch.tensor([[[0, 2], [1, 1], [0, 2]]])
    ranges = IndexLists.from_ranges(first, first + torch.tensor([1, 0]), 2, 3)
    assert (9, [[[0, 3, 6]] * 2]) == (ranges.indices.numel(), ranges.offsets.tolist())
    keep = bits(1, 2, 3, 4)
    made = IndexLists.from_map(keep)
    sizes = keep.sum(-1).flatten().tolist()
    assert (sum(sizes), [sum(sizes[:i]) for i in range(6)]) == (made.indices.numel(), made.offsets.flatten().tolist())
    assert [0] == IndexLists.from_map(torch.zeros_like(keep)).indices.tolist()
    none = IndexLists.empty(2, 3, 4, torch.device("cpu"))
    assert ((2, 3, 4), 0, [0]) == (none.shape, int(none.counts.sum()), none.indices.tolist())


def test_a_window_begins_a_list_within_the_run_of_a_full_mask() -> None:
    full = IndexLists.full(make(12, window=3).geometry, 4, 4)
    assert [[[0, 0, 1]] * 2] == full.offsets.tolist()
    assert [[[1, 2, 2]] * 2] == full.counts.tolist()


def test_entries_behind_a_list_are_no_entries() -> None:
    lists = IndexLists.from_map(bits(1, 1, 4, 6))
    entry, index = lists.padded(9)
    assert (1, 1, 4, 9) == tuple(index.shape)
    assert torch.int64 == index.dtype
    assert lists.counts.tolist() == entry.sum(-1).tolist()
    for row in range(4):
        assert lists.row(0, 0, row).tolist() == index[0, 0, row][entry[0, 0, row]].tolist()


def test_indices_out_of_the_map_are_left_out_of_it() -> None:
    indices = torch.tensor([-1, 0, 2, 3, 9], dtype=torch.int32)
    lists = IndexLists(torch.tensor([[[5]]], dtype=torch.int32), torch.zeros(1, 1, 1, dtype=torch.int64), indices)
    assert [True, False, True] == lists.to_map(3)[0, 0, 0].tolist()


@pytest.mark.parametrize("rows", [8, 9])
def test_few_values_of_padding_are_shown(rows: int) -> None:
    text = make(4, batch=rows, starts=int32(*[0] * rows)).geometry.describe()
    assert ("starts=[0, 0, 0, 0, 0, 0, 0, 0]" in text, "starts=of cpu" in text) == (rows == 8, rows == 9)


def test_padding_of_another_type_or_length_does_not_fit() -> None:
    base = make(4, batch=2, starts=int32(0, 1)).geometry
    assert base.starts is not None
    assert not base.fits(evolve(base, starts=base.starts.long()))
    assert not base.fits(evolve(base, starts=int32(0)))
    assert base.fits(evolve(base, starts=int32(0, 1)))


def test_memory_of_the_lists_in_bytes() -> None:
    keep = bits(1, 1, 3, 12)
    mask = sp.SparseMask.from_stripes(CALL, keep, tile=4, diagonal=False)
    stripes = 2 * (3 * (4 + 8) + int(keep.sum()) * 4)
    assert stripes == mask.nbytes
    both = sp.SparseMask.from_stripes(CALL, keep, tile=4)
    assert stripes + 2 * 3 * (4 + 8 + 4) == both.nbytes
    assert 0 == sp.SparseMask.empty(CALL, 4).nbytes


def test_shades_by_hand() -> None:
    """8 rows and keys in cells of 2: tiles of 2 on the diagonal and in the first column."""
    call = make(8)
    mask = sp.SparseMask.from_tiles(call, torch.eye(4, dtype=torch.bool) | (torch.arange(4) == 0), 2)
    shade = mask.shade(4)
    assert (1, 2, 4, 4) == tuple(shade.shape)
    nan = torch.nan
    expected = torch.tensor([[1, nan, nan, nan], [1, 1, nan, nan], [1, 0, 1, nan], [1, 0, 0, 1.0]])
    torch.testing.assert_close(shade[0, 1], expected, equal_nan=True)
    half = sp.SparseMask.from_stripes(call, (torch.arange(8) % 2 == 0)[None], group=4, tile=2, diagonal=False)
    torch.testing.assert_close(half.shade(2)[0, 0], torch.tensor([[0.6, nan], [0.5, 0.6]]), equal_nan=True)
    # An odd number of keys: cells of another size than the queries'.
    wide = sp.SparseMask.from_stripes(make(4, 6), (torch.arange(6) == 5)[None], group=2, tile=2, diagonal=False)
    torch.testing.assert_close(wide.shade(2)[0, 0], torch.tensor([[0.0, 0.0], [0.0, 0.2]]), equal_nan=True)


@pytest.mark.parametrize("cells", [1, 3, 5, 64])
def test_shades_are_those_of_the_dense_form(cells: int) -> None:
    call = make(20, 27, batch=2, starts=int32(0, 9), window=14)
    mask = sp.SparseMask.from_tiles(call, bits(2, 2, call.geometry.tile_rows(4), 7), 4)
    dense, allowed = mask.to_dense().float(), call.geometry.visible()[:, None].expand(-1, 2, -1, -1).float()
    shade = mask.shade(cells)
    for i in range(cells):
        rows = [n for n in range(20) if n * cells // 20 == i]
        for j in range(cells):
            keys = [n for n in range(27) if n * cells // 27 == j]
            have, of = (x[:, :, rows][..., keys].sum((2, 3)) for x in (dense, allowed))
            torch.testing.assert_close(torch.where(of > 0, have / of, torch.nan), shade[:, :, i, j], equal_nan=True)


def test_of_many_rows_every_so_many_stand_for_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "SHADED", 2)
    seen: list[int] = []
    real = sp.SparseMask._chosen

    def chosen(self: sp.SparseMask, rows: torch.Tensor) -> torch.Tensor:
        seen.extend(rows.tolist())
        return real(self, rows)

    monkeypatch.setattr(sp.SparseMask, "_chosen", chosen)
    sp.SparseMask.full(make(50), 8).shade(5)
    assert list(range(0, 50, 5)) == seen
    seen.clear()
    sp.SparseMask.full(make(19), 8).shade(5)
    assert list(range(19)) == seen


@pytest.mark.parametrize(("pairs", "sizes"), [(1, [1] * 10), (48, [2] * 5), (71, [2] * 5), (72, [3, 3, 3, 1])])
def test_rows_come_in_chunks_of_so_many_pairs(pairs: int, sizes: list[int]) -> None:
    """Of 2 heads and 12 keys: 24 pairs a row."""
    chunks = masks._row_chunks(CALL.geometry, 1, pairs)
    assert sizes == [len(one) for one in chunks]
    assert list(range(10)) == torch.cat(list(chunks)).tolist()


def test_a_picture() -> None:
    call = make(8)
    stripes = (torch.arange(8) == 0)[None].expand(1, 8)
    mask = sp.SparseMask.from_stripes(call, stripes, group=4, tile=2)
    assert ["#   ", "+#  ", "+.# ", "+..#"] == mask.picture(cells=4).split("\n")
    assert 32 == len(mask.picture().split("\n"))
    assert mask.picture(0, 0, 4) == mask.picture(0, 1, 4)


def test_the_largest_tile_is_128() -> None:
    call = make(300)
    for mask in (sp.SparseMask.full(call), sp.SparseMask.empty(call), sp.SparseMask.from_rules(call, sink=1)):
        assert (128, 128) == (mask.tile_q, mask.tile_k)
    assert 128 == sp.SparseMask.from_tiles(call, bits(1, 1, 3, 3)).tile_q
    assert 128 == sp.SparseMask.from_stripes(call, bits(1, 1, 3, 300)).tile_k
    first = torch.zeros(1, 3, 1, dtype=torch.int64)
    assert 128 == sp.SparseMask.from_ranges(call, first, first + 1, 3).tile_k


def test_difference_leaves_the_larger_groups() -> None:
    """Stripes alone are left in groups that divide both sides', not in single tiles."""
    call = make(48)
    wide = sp.SparseMask.from_stripes(call, bits(1, 1, 2, 48), group=6, tile=4, diagonal=False)
    narrow = sp.SparseMask.from_stripes(call, bits(1, 1, 6, 48, seed=1), group=2, tile=4, diagonal=False)
    left = wide - narrow
    assert (4, 2, 8) == (left.tile_q, left.group, left.group_rows)
    assert torch.equal(wide.to_dense() & ~narrow.to_dense(), left.to_dense())
    tiles = sp.SparseMask.from_tiles(call, bits(1, 1, 6, 6), 8, diagonal=False)
    beside = wide - tiles
    assert 8 == beside.group_rows
    assert torch.equal(wide.to_dense() & ~tiles.to_dense(), beside.to_dense())


def test_the_union_of_stripes_and_tiles_is_not_called_disjoint() -> None:
    call = make(48)
    stripes = evolve(sp.SparseMask.from_stripes(call, bits(1, 1, 6, 48), tile=8, diagonal=False), disjoint=True)
    tiles = evolve(sp.SparseMask.from_tiles(call, bits(1, 1, 6, 6), 8), disjoint=True)
    other = evolve(sp.SparseMask.from_stripes(call, bits(1, 1, 12, 48), tile=4, diagonal=True), disjoint=True)
    for one in (stripes | tiles, tiles | stripes, other | tiles, other | stripes):
        assert not one.disjoint
        assert int(one.to_dense().sum()) == int(one.pairs().sum())
    assert (stripes | sp.SparseMask.empty(call, 8)).disjoint


def test_the_union_of_tiles_with_coarser_stripes_keeps_both_lists() -> None:
    call = make(48)
    stripes = sp.SparseMask.from_stripes(call, bits(1, 1, 3, 48), group=2, tile=8, diagonal=False)
    tiles = sp.SparseMask.from_tiles(call, bits(1, 1, 12, 12), 4)
    for one in (stripes | tiles, tiles | stripes):
        assert (4, 4, 4) == (one.tile_q, one.tile_k, one.group)
        assert stripes.stripes is one.stripes
    finer = sp.SparseMask.from_tiles(call, bits(1, 1, 4, 4), 12)
    joined = stripes | finer
    assert (4, 4, 4) == (joined.tile_q, joined.tile_k, joined.group)
    assert torch.equal(stripes.to_dense() | finer.to_dense(), joined.to_dense())


def test_the_union_of_tiles_with_stripes_keeps_the_tiles() -> None:
    """Whatever tiles the stripes' mask would have, as long as their groups are made of the others."""
    call = make(48)
    stripes = sp.SparseMask.from_stripes(call, bits(1, 1, 4, 48), group=2, tile=(6, 10), diagonal=False)
    tiles = sp.SparseMask.from_tiles(call, bits(1, 1, 12, 12), 4)
    for one in (stripes | tiles, tiles | stripes):
        assert (4, 4, 3) == (one.tile_q, one.tile_k, one.group)
        assert torch.equal(stripes.to_dense() | tiles.to_dense(), one.to_dense())


WIDE = make(32, heads=4, kv_heads=2).geometry


def tile_map(**fields: Any) -> TileMap:
    return TileMap(geometry=WIDE, tile_q=4, tile_k=4, **fields)


@pytest.mark.parametrize(
    "pair",
    [
        (tile_map(band=1), tile_map(band=3, sink=2)),
        (tile_map(sink=3), tile_map(keep=bits(1, 4, 8, 8))),
        (tile_map(keep=bits(1, 2, 8, 8)), tile_map(keep=bits(1, 4, 8, 8, seed=1), band=0)),
        (tile_map(stride=Stride(3, 7)), tile_map(random=Random(1 << 30, 5))),
        (tile_map(stride=Stride(3, 7)), tile_map(stride=Stride(2, 7))),
        (tile_map(random=Random(1 << 30, 5)), tile_map(random=Random(1 << 30, 6))),
        (tile_map(stride=Stride(3, 7), first_head=2), tile_map(random=Random(1 << 30, 5))),
        (tile_map(stride=Stride(3, 7), first_head=2), tile_map(band=1)),
        (tile_map(band=1), tile_map(stride=Stride(3, 7), first_head=2)),
        (tile_map(stride=Stride(3, 7), first_head=2), tile_map(stride=Stride(3, 7), first_head=2, sink=1)),
    ],
)
def test_rules_unite_as_their_maps(pair: tuple[TileMap, TileMap]) -> None:
    for one, other in (pair, pair[::-1]):
        united = one | other
        assert torch.equal(one.resolved | other.resolved, united.resolved)
        assert torch.equal(united.resolved, united.lists.to_map(8))


def test_rules_that_agree_stay_rules() -> None:
    both = tile_map(stride=Stride(3, 7)) | tile_map(random=Random(9, 5), band=2) | tile_map(sink=3)
    assert both.keep is None
    assert (Stride(3, 7), Random(9, 5), 2, 3) == (both.stride, both.random, both.band, both.sink)
    assert 2 == (tile_map(band=1) | tile_map(stride=Stride(3, 7), first_head=2)).first_head


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_united_groups_of_maps_with_shared_heads(heads: int, group: int) -> None:
    keep = bits(1, heads, 8, 8)
    made = tile_map(keep=keep, band=0)
    found = made.united(group)
    assert (found is made) == ((4 // heads) % group == 0)
    each = made.resolved.unflatten(1, (-1, group)).any(2)
    assert torch.equal(each.repeat_interleave(group, 1), found.resolved)


def test_rules_by_head_are_united_too() -> None:
    made = tile_map(stride=Stride(5, 1))
    assert made.united(2) is not made
    assert torch.equal(made.resolved.unflatten(1, (2, 2)).any(2).repeat_interleave(2, 1), made.united(2).resolved)
    assert tile_map(band=1).united(4).by_head is False
    assert (True, True) == (made.by_head, tile_map(random=Random(1, 1)).by_head)


def test_a_stride_keeps_one_of_every_so_many_neighbours() -> None:
    """By the rule: (column + phase) divides, with the phase of the row's hash."""
    from sparseprefill.mask import tile_map as hashing

    for every in (1, 2, 3, 7):
        phase = hashing.row_hash(WIDE, 4, 11)
        kept = tile_map(stride=Stride(every, 11))._by_rules()
        expected = (torch.arange(8) + phase[..., None]) % every == 0
        assert torch.equal(expected, kept)


def test_what_kernels_are_given() -> None:
    made = tile_map(band=1, sink=2, stride=Stride(3, 7), random=Random(9, 5), first_head=6)
    geometry, tile_q, tile_k, keep, given, per_row, per_column = made.kernel_arguments()
    assert (WIDE, 4, 4, None, 1, 1) == (geometry, tile_q, tile_k, keep, per_row, per_column)
    assert (1, 2, 3, 7) == (given.band, given.sink, given.every, given.stride_state)
    assert (8, 5, 6) == (given.random_last, given.random_state, given.first_head)
    bare = tile_map(sink=2).kernel_arguments()[4]
    assert (None, 0, None, 0, 0) == (
        bare.every, bare.stride_state, bare.random_last, bare.random_state, bare.first_head
    )  # fmt: skip


def test_pairs_of_few_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many heads as `ENTRIES` has room for, one at least; the figures stay the same."""
    call = make(64, heads=6, kv_heads=2)
    mask = sp.SparseMask.from_stripes(call, bits(1, 6, 4, 64), group=2, tile=8)
    expected = mask.to_dense().sum((2, 3))
    seen: list[int] = []
    real = count._of_heads

    def of_heads(*given: Any) -> torch.Tensor:
        seen.append(given[-1].stop - given[-1].start)
        return real(*given)

    monkeypatch.setattr(count, "_of_heads", of_heads)
    rows = 8 * (8 + 2 * 8)
    for entries, sizes in ((1, [1] * 6), (2 * rows - 1, [1] * 6), (2 * rows, [2] * 3), (4 * rows, [4, 2])):
        monkeypatch.setattr(count, "ENTRIES", entries)
        seen.clear()
        assert torch.equal(expected, mask.pairs())
        assert sizes == seen
    alike = sp.SparseMask.full(call, 8)
    seen.clear()
    assert torch.equal(torch.full((1, 6), 64 * 65 // 2), alike.pairs())
    assert [1] == seen


def test_the_share_of_nothing() -> None:
    geometry = make(4, batch=2, lengths=int32(0, 0)).geometry
    assert 0.0 == count.share(torch.zeros(2, 2, dtype=torch.int64), geometry)
    assert (0, 2 * 10) == (count.allowed_pairs(geometry), count.allowed_pairs(make(4).geometry))
    assert 0.25 == count.share(torch.tensor([[3, 2]]), make(4).geometry)


def test_a_head_is_a_mask() -> None:
    head = sp.SparseMask.full(make(8, batch=2), 4).head(1, 1)
    assert (1, 1) == (head.geometry.batch, head.geometry.heads)


def test_geometry_of_a_chunk_by_hand() -> None:
    one = Geometry(1, 1, 6, 20, 9, torch.device("cpu"), window=5)
    assert ([[1, 2]], [[2, 3]]) == (one.tiles(6).tolist(), one.tiles(4).tolist())
    assert (2, 2, 1) == (one.tile_rows(6), one.tile_rows(4), one.tile_rows(16))
    assert (4, 5, 1) == (one.tile_columns(5), one.tile_columns(4), one.tile_columns(20))
    assert [[5] * 6] == one.visible_counts().tolist()


def test_rows_of_padding_have_empty_lists() -> None:
    geometry = make(12, batch=2, starts=int32(0, 9)).geometry
    full = IndexLists.full(geometry, 4, 4)
    expected = [[min(max(tile + 1, 0), 3) for tile in row] for row in geometry.tiles(4).tolist()]
    assert 0 in expected[1]
    assert [[row, row] for row in expected] == full.counts.tolist()


def test_counting_looks_at_few_entries_of_each_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """At an edge what a query tile's rows and one key tile can cut; between them whole tiles."""
    call, width = make(64, heads=2, kv_heads=2), 4
    mask = sp.SparseMask.from_tiles(call, bits(1, 2, 8, 4), (8, 16)) | sp.SparseMask.from_stripes(
        call, bits(1, 2, 4, 16), group=2, tile=(8, 16), width=width, diagonal=False
    )
    taken: list[int] = []
    parts: list[tuple[int, int]] = []
    take, part = count.Lists.take, count.Lists.part

    def looked(self: Any, first: torch.Tensor, number: int) -> torch.Tensor:
        taken.append(number)
        return take(self, first, number)

    def cut(self: Any, rows: slice) -> Any:
        parts.append((rows.start, rows.stop))
        return part(self, rows)

    monkeypatch.setattr(count.Lists, "take", looked)
    monkeypatch.setattr(count.Lists, "part", cut)
    monkeypatch.setattr(count, "ENTRIES", 1)
    assert torch.equal(mask.to_dense().sum((2, 3)), mask.pairs())
    columns = (8 + 16) // width + 2
    assert [(8 + 16) // 16 + 2, columns, columns, *[4] * 8] * 2 == taken
    assert [(row, row + 1) for row in range(8)] * 2 == parts


def test_counts_are_of_their_lists_alone() -> None:
    lists = IndexLists.full(CALL.geometry, 4, 4)
    for build in (
        lambda: count._Rows.of(CALL.geometry, 4, 4),
        lambda: count.Lists.of(lists, slice(0, 1), 4, CALL.geometry),
    ):
        assert build() != build()


def test_temporary_tensors_have_so_many_numbers() -> None:
    """64 MiB of int64, and for pictures 4 MiB of bool."""
    chunks = masks._row_chunks(evolve(CALL.geometry, q_len=9, kv_len=1 << 20), 1)
    assert (1 << 23, [2, 2, 2, 2, 1], 16) == (count.ENTRIES, [len(one) for one in chunks], masks.SHADED)


def test_the_largest_tile() -> None:
    assert sp.SparseMask(make(8).geometry, 2**31 - 1, 2**31 - 1, None).tile_q == 2**31 - 1


def test_stripes_are_checked_where_there_are_no_tiles() -> None:
    geometry = make(8).geometry
    wrong = IndexLists(int32(2).expand(1, 2, 1), torch.zeros(1, 2, 1, dtype=torch.int64), int32(5, 3))
    with pytest.raises(MaskError, match="stripes"):
        sp.SparseMask(geometry, 4, 4, None, 2, wrong).check()


def test_a_plan_without_tiles_holds_none_on_its_own_grid() -> None:
    call = make(24, 40)
    columns = torch.ones(1, 2, 1, 40, dtype=torch.bool)
    mask = sp.SparseMask.from_stripes(call, columns, 8, (8, 4), diagonal=False)
    plan = sp.Plan(mask)
    assert (8, 4) == plan.common_grid()
    held = plan.tiles_on(8, 4)
    assert (1, 2, call.geometry.tile_rows(8), 10) == tuple(held.shape)
    assert not held.any()


@pytest.mark.parametrize("width", [1, 4, 6])
@pytest.mark.parametrize("window", [None, 1, 5, 9, 40])
def test_the_keys_that_every_row_of_a_tile_sees(width: int, window: int | None) -> None:
    """As many as lie on the grid; every other key that some row sees is at an edge, and no more than those."""
    call = make(20, 31, batch=2, starts=int32(0, 9), lengths=int32(31, 17), window=window)
    geometry = call.geometry
    rows = count._Rows.of(geometry, 4, width)
    visible, key = geometry.visible(), torch.arange(31)
    position = geometry.query_positions()
    for b in range(2):
        seen = torch.stack([visible[b, :, one] for one in range(31)], -1)
        if b:  # on its own grid
            seen = functional.pad(seen[:, 9:], (0, 9))
        for tile in range(rows.first.shape[-1]):
            first, last, low, high = (int(one[b, 0, tile]) for one in (rows.first, rows.last, rows.low, rows.high))
            of = seen[(position[b] >= first) & (position[b] <= last)]
            if last < first:
                continue
            edges = [(int(a[b, 0, tile]), int(e[b, 0, tile])) for a, e in rows.edges]
            inside = (key >= low) & (key < high)
            beside = torch.stack([(key >= a) & (key < e) for a, e in edges]).any(0)
            assert not (inside & ~of.all(0)).any()
            assert not (of.any(0) & ~inside & ~beside).any()
            some = of.any(0).nonzero()
            assert last + 1 == edges[0][1] == int(some[-1]) + 1
            assert edges[1:] == ([] if window is None else [(int(some[0]), low)])
            whole = [at for at in range(0, 31 - width, width) if of[:, at : at + width].all()]
            assert all(low <= at and at + width <= high for at in whole)


@pytest.mark.parametrize("group", [1, 2, 6])
def test_lists_that_several_rows_share_are_read_once(group: int) -> None:
    call = make(24, 48)
    columns = bits(1, 2, 6 // group, 48)
    mask = sp.SparseMask.from_stripes(call, columns, group, 4, diagonal=False)
    for rows, expected in ((torch.arange(24, 48, 4), 6 // group), (torch.tensor([25, 47]), min(2, 6 // group))):
        found = stripes_at([mask], rows[None], 48)
        assert found is not None
        assert expected == found.map.shape[2]
        assert torch.equal(columns.repeat_interleave(4 * group, 2)[:, :, rows - 24], found.by_row)


def test_whether_a_stripe_may_lie_in_a_tile() -> None:
    call = make(32)
    tiles = sp.SparseMask.full(call, 8)
    stripes = sp.SparseMask.from_stripes(call, bits(1, 2, 2, 32), 2, 8, diagonal=False)
    both = sp.SparseMask(call.geometry, 8, 8, tiles.tiles, 2, stripes.stripes)
    found = [one.overlapping for one in (tiles, stripes, both, evolve(both, disjoint=True))]
    assert [False, False, True, False] == found
