"""Kernels over groups of tokens on the pages of a cache: as on a copy, which is made only where groups need one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.bfla import kernels as bfla
from sparseprefill.plugins.xattention import kernels as xattention

from kernels.caches import LAYOUTS, STORED, copied, in_fp8, paged, untouched
from kernels.groups import CUDA, DEVICE, DTYPES, TMA, make, small_settings
from sparseprefill import AttentionCall
from sparseprefill.kernels import groups as group_keys
from sparseprefill.kernels import groups as group_launch
from sparseprefill.kernels.groups import GroupTiles
from sparseprefill.mask.geometry import reachable_map
from sparseprefill.parts.split import Part

# numpy, which the interpreter computes with, warns of the infinities and NaNs that belong here
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = (1, 4, 8, 16)
PAGES = (1, 16, 48, 128)
LENGTHS = [(1, 0), (127, 0), (50, 79), (33, 218)]
"""Queries, and keys before them."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, (16, 32), TMA[-1])
    in_place(monkeypatch)


def in_place(patch: pytest.MonkeyPatch) -> None:
    """Keys stay in their pages where a copy would only be faster."""
    patch.setattr(group_keys, "COPY", 0)


def small(patch: pytest.MonkeyPatch, tile: tuple[int, int], tma: bool) -> None:
    """Small tiles, the same for pages and tensors, so that results are equal."""
    chosen = small_settings(patch, tile, tma)
    patch.setattr(group_launch, "paged_settings", lambda *_: chosen)


def results(call: AttentionCall, size: int) -> dict[str, torch.Tensor]:
    """What both methods make of the keys. Scores of blocks are 0 where no kernel need write them."""
    block = max(16, 2 * size)
    there = reachable_map(call.geometry, block, block)[:, None]
    return {
        "scores": bfla.block_scores(call, block, size).masked_fill_(~there, 0.0),
        "tiles": xattention.tile_scores(call, size, block),
    }


def equal(call: AttentionCall, size: int, other: AttentionCall | None = None) -> None:
    """As on a copy (or `other`), to the last bit: tiles are the same, and so is the order of sums."""
    expected, actual = results(copied(call) if other is None else other, size), results(call, size)
    for name, x in actual.items():
        assert not bool(x.isnan().any()), name
        assert torch.equal(expected[name], x), name


def check(call: AttentionCall, size: int) -> None:
    """The same, with nothing copied."""
    equal(call, size)
    assert untouched(call)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_any_size_and_layout(layout: str, page: int) -> None:
    """In the interpreter each length takes one size and dtype by turns."""
    turn = PAGES.index(page) + sorted(LAYOUTS).index(layout)
    for number, (q_len, before) in enumerate(LENGTHS):
        for size in SIZES if CUDA else (SIZES[(number + turn) % 4],):
            for dtype in DTYPES if CUDA else (DTYPES[(number + turn // 2) % 2],):
                check(paged(make(dtype, (1, 1), q_len, before, 0), page, layout, seed=number), size)


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize(("heads", "tile"), [((2, 2), (16, 16)), ((4, 2), (16, 32)), ((4, 1), (16, 64))], ids=str)
def test_any_tile_and_number_of_heads(
    heads: tuple[int, int], tile: tuple[int, int], tma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, tile, tma)
    check(paged(make(torch.float16, heads, 120, 13, 0, width=24), 16), 8)


@pytest.mark.parametrize("tma", TMA)
def test_the_same_tiles_are_kept(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, (16, 32), tma)
    call = paged(make(torch.float16, (2, 1), 120, 13, 0), 48)
    expected, actual = (bfla.kept_tiles(x, 32, 8, 0.04, None, 0.8, 16) for x in (copied(call), call))
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
    assert untouched(call)


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize(
    "features", [{"after": 45}, {"window": 40}, {"softcap": 3.0, "scale": 0.3}, {"lengths": [100]}], ids=str
)
def test_every_feature_of_a_call(features: dict[str, Any], tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, (16, 32), tma)
    check(paged(single(100, 27, **features), 48, "LBHNC"), 4)


def single(q_len: int, before: int, after: int = 0, **options: Any) -> AttentionCall:
    """A call of one batch row, which lists of starts and lengths do not change."""
    rows: dict[str, Any] = {
        name: torch.tensor(options.pop(name), dtype=torch.int32, device=DEVICE)
        for name in ("starts", "lengths")
        if name in options
    }
    return evolve(make(torch.float32, (2, 1), q_len, before, after, **options), **rows)


@pytest.mark.parametrize("tma", TMA)
def test_queries_go_by_descriptors_and_keys_by_pointers(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, (16, 32), tma)
    call = paged(make(torch.float16, (2, 1), 129, 3, 0), 16)
    tiles = GroupTiles.of(call, 16, 4)
    flags = [part.flags for part in tiles.parts(range(tiles.count))]
    assert {one["PAGE"] for one in flags} == {16}
    assert [one["TMA"] for one in flags] == ([False, True] if tma else [False])


@pytest.mark.parametrize(("heads", "rows"), [((2, 4), (0, 130)), ((1, 2), (32, 101)), ((0, 4), (0, 61))], ids=str)
def test_a_part_reads_its_own_keys(heads: tuple[int, int], rows: tuple[int, int]) -> None:
    plain, part = make(torch.float16, (4, 2), 130, 21, 0), Part(heads, rows)
    whole = paged(plain, 16)
    equal(part.of(whole), 8, part.of(plain))
    assert untouched(whole)


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("stored", STORED)
def test_an_fp8_cache_is_converted_as_it_is_read(stored: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter each takes one length, layout, dtype, size and way of reading queries by turns."""
    turn = list(STORED).index(stored) + page // 16
    small(monkeypatch, (16, 32), TMA[turn % len(TMA)])
    lengths = [(1, 0), (1, 126), (90, 37), (129, 0)]
    for q_len, before in lengths if CUDA else [lengths[turn % 4]]:
        for dtype in DTYPES if CUDA else [DTYPES[turn // 4 % 2]]:
            for size in (8, 32) if CUDA else [(8, 32)[turn // 2 % 2]]:
                plain = make(dtype, (2, 1), q_len, before, 0, width=24)
                check(in_fp8(plain, page, sorted(LAYOUTS)[turn % 2], *STORED[stored]), size)


@pytest.mark.parametrize("features", [{"after": 45}, {"window": 40}, {"softcap": 3.0}, {"lengths": [100]}], ids=str)
def test_every_feature_of_a_call_on_an_fp8_cache(features: dict[str, Any]) -> None:
    check(in_fp8(single(100, 27, **features), 48, "LBNHC", *STORED["e4m3, uneven"]), 4)


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_several_pages(layout: str, tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter each takes half of the shapes by turns: every shape meets both layouts and both ways."""
    small(monkeypatch, (16, 32), tma)
    shapes = (((1, 0), 32, 16), ((129, 0), 64, 16), ((70, 61), 32, 8), ((33, 98), 64, 32))
    turn = (sorted(LAYOUTS).index(layout) + tma) % 2
    for lengths, size, page in shapes if CUDA else shapes[turn::2]:
        check(paged(make(torch.float16, (2, 1), *lengths, 0, width=24), page, layout), size)


def test_pages_that_cut_groups_are_copied() -> None:
    call = paged(make(torch.float16, (2, 1), 90, 37, 0), 24)
    equal(call, 16)
    assert not untouched(call)
    check(paged(call, 24), 8)


def test_padding_that_moves_groups_is_copied() -> None:
    call = paged(single(90, 37, starts=[5]), 16)
    equal(call, 8)
    assert not untouched(call)


def test_a_copy_that_exists_is_read() -> None:
    call = paged(make(torch.float16, (2, 1), 90, 37, 0), 16)
    assert GroupTiles.of(call, 16, 8).keys.page == 16
    made = call.k
    assert GroupTiles.of(call, 16, 8).keys.k.data_ptr() == made.data_ptr()
    equal(call, 8)


@pytest.mark.parametrize(
    ("tma", "q_len", "most", "may", "copied"),
    [
        (True, 20, 1 << 20, True, True),
        (True, 12, 1 << 20, True, False),
        (True, 20, 1000, True, False),
        (False, 20, 1 << 20, True, False),
        (True, 20, 1 << 20, False, False),
    ],
    ids=["often", "less often", "too large", "no descriptors", "not allowed"],
)
def test_what_reads_all_keys_often_copies_them_for_descriptors(
    tma: bool, q_len: int, most: int, may: bool, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, (16, 32), tma)
    monkeypatch.setattr(group_keys, "COPY", most)
    plain = make(torch.float16, (2, 1), q_len, 121 - q_len, 0)
    for made in (paged(plain, 16), in_fp8(plain, 16)):
        assert made.pages is not None
        pages = evolve(made.pages, copies=may)
        call = evolve(made, k=pages, v=pages)
        equal(call, 8)
        assert untouched(call) is not copied


def test_what_stands_behind_the_keys_does_not_count() -> None:
    """Slots of the last page that hold no key."""
    plain = make(torch.float16, (1, 1), 61, 0, 0)
    expected = results(plain, 8)
    for garbage in (math.nan, math.inf, 7.0):
        found = results(paged(plain, 48, garbage=garbage), 8)
        assert all(torch.equal(expected[name], x) for name, x in found.items())


@settings(max_examples=40 if CUDA else 5, deadline=None)
@given(st.data())
def test_equals_the_copy(data: st.DataObject) -> None:
    size, page = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(PAGES))
    heads = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 1)] if CUDA else [(1, 1), (2, 1)]))
    plain = make(
        data.draw(st.sampled_from(DTYPES)), heads, data.draw(st.integers(1, 200 if CUDA else 90)),
        data.draw(st.integers(0, 90)), data.draw(st.integers(0, 40)), width=data.draw(st.sampled_from([16, 24])),
        window=data.draw(st.none() | st.integers(1, 150)), softcap=data.draw(st.sampled_from([None, 3.0])),
    )  # fmt: skip
    layout, stored = data.draw(st.sampled_from(sorted(LAYOUTS))), data.draw(st.none() | st.sampled_from(sorted(STORED)))
    call = paged(plain, page, layout) if stored is None else in_fp8(plain, page, layout, *STORED[stored])
    with pytest.MonkeyPatch.context() as patch:
        small(patch, data.draw(st.sampled_from([(16, 16), (16, 32), (16, 64)])), data.draw(st.sampled_from(TMA)))
        check(call, size)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_len", "before"), [(4096, 0), (3001, 1095)])
def test_production_settings(
    dtype: torch.dtype, q_len: int, before: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages may have tiles of their own there, and so another order of sums."""
    monkeypatch.undo()
    in_place(monkeypatch)
    for block, size in ((256, 16), (128, 8), (256, 64)):
        call = paged(make(dtype, (8, 2), q_len, before, 0, width=128), page)
        there = reachable_map(call.geometry, block, block)[:, None].expand(-1, 8, -1, -1)
        expected, actual = (bfla.block_scores(x, block, size)[there] for x in (copied(call), call))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=3e-2)
        expected, actual = (xattention.tile_scores(x, size, block) for x in (copied(call), call))
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        assert untouched(call)
