"""Geometry: positions, tiles and visibility on each row's own grid."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from helpers.build import int32, make
from sparseprefill.mask.geometry import diagonal_map
from sparseprefill.testing import allowed_pairs


def test_bottom_right_positions() -> None:
    geometry = make(3, 5).geometry
    assert [[2, 3, 4]] == geometry.query_positions().tolist()
    assert [[0, 1, 2, 3, 4]] == geometry.key_positions().tolist()
    assert [[3, 4, 5]] == geometry.visible_counts().tolist()


def test_left_padding_moves_the_grid() -> None:
    geometry = make(4, batch=2, starts=int32(0, 3)).geometry
    assert [[0, 1, 2, 3], [-3, -2, -1, 0]] == geometry.query_positions().tolist()
    assert [4, 1] == geometry.key_counts().tolist()
    assert [[True] * 4, [False, False, False, True]] == geometry.real_queries().tolist()
    assert [[1, 2, 3, 4], [0, 0, 0, 1]] == geometry.visible_counts().tolist()


def test_right_padding_ends_the_row() -> None:
    geometry = make(4, batch=2, lengths=int32(4, 2)).geometry
    assert [[True] * 4, [True, True, False, False]] == geometry.real_queries().tolist()
    assert [[True, False, False, False], [True, True, False, False]] + [[False] * 4] * 2 == geometry.visible()[
        1
    ].tolist()


@pytest.mark.parametrize("window", [None, 1, 3, 99])
@pytest.mark.parametrize("rows", [{}, {"starts": int32(0, 7)}, {"lengths": int32(20, 4)}])
def test_visibility_agrees_with_the_fields(window: int | None, rows: dict[str, Any]) -> None:
    call = make(13, 20, batch=2, window=window, **rows)
    expected = allowed_pairs(call)
    assert torch.equal(expected, call.geometry.visible())
    assert torch.equal(expected.sum(-1), call.geometry.visible_counts())
    some = torch.tensor([0, 5, 12])
    assert torch.equal(expected[:, some], call.geometry.visible(some))


def test_tiles_lie_on_the_absolute_grid() -> None:
    geometry = make(10, 25).geometry  # query positions 15..24
    assert 3 == geometry.tile_rows(8)
    assert [[1, 2, 3]] == geometry.tiles(8).tolist()
    assert 4 == geometry.tile_columns(8)


@pytest.mark.parametrize("tile", [1, 7, 16, 128])
@pytest.mark.parametrize("start", [0, 1, 15, 39])
def test_tile_rows_cover_every_row_of_a_padded_batch(tile: int, start: int) -> None:
    geometry = make(40, batch=2, starts=int32(0, start)).geometry
    tiles, wanted = geometry.tiles(tile), torch.div(geometry.query_positions(), tile, rounding_mode="floor")
    assert bool((wanted >= tiles[:, :1]).all())
    assert bool((wanted <= tiles[:, -1:]).all())


def test_fits_compares_sizes() -> None:
    geometry = make(4, 6).geometry
    assert geometry.fits(make(4, 6, kind="sink").geometry)
    others: list[dict[str, Any]] = [
        {"batch": 2},
        {"heads": 1},
        {"q_len": 3},
        {"kv_len": 7},
        {"q_offset": 1},
        {"window": 2},
    ]
    for other in others:
        assert not geometry.fits(evolve(geometry, **other))


@pytest.mark.parametrize("name", ["starts", "lengths"])
def test_fits_compares_the_padding(name: str) -> None:
    one, same, other = (
        make(10, 12, batch=2, **dict[str, Any]({name: rows})) for rows in (int32(0, 5), int32(0, 5), int32(4, 0))
    )
    bare = make(10, 12, batch=2)
    assert one.geometry.fits(same.geometry)
    assert one.geometry.same_sizes(other.geometry)
    for wrong in (other, bare):
        assert not one.geometry.fits(wrong.geometry)
        assert not wrong.geometry.fits(one.geometry)


@pytest.mark.parametrize("name", ["starts", "lengths"])
def test_fits_reads_no_padding_on_a_device(name: str) -> None:
    """Meta tensors have no values, and so stand for a device on which a look at them would wait."""
    rows = torch.zeros(4, dtype=torch.int32, device="meta")
    geometry = evolve(make(4, 6, batch=2).geometry, **dict[str, Any]({name: rows[:2]}))
    assert geometry.fits(evolve(geometry, **dict[str, Any]({name: rows[:2]})))
    assert not geometry.fits(evolve(geometry, **dict[str, Any]({name: rows[::2]})))


def test_description_names_the_padding() -> None:
    assert "q_offset=2, starts=[0, 5]]" in make(10, 12, batch=2, starts=int32(0, 5)).geometry.describe()


def test_description_names_the_sizes() -> None:
    assert "[B=1, Hq=2, Nq=4, Nkv=6, q_offset=2]" == make(4, 6).geometry.describe()


@pytest.mark.parametrize(("tile_q", "tile_k"), [(8, 8), (16, 4), (4, 16), (8, 5)])
def test_diagonal_tiles_are_those_that_hold_a_rows_own_position(tile_q: int, tile_k: int) -> None:
    geometry = make(40, 72).geometry  # query positions 32..71
    expected = torch.zeros(1, geometry.tile_rows(tile_q), geometry.tile_columns(tile_k), dtype=torch.bool)
    for row, tile in enumerate(geometry.tiles(tile_q)[0].tolist()):
        own = range(tile * tile_q // tile_k, ((tile + 1) * tile_q - 1) // tile_k + 1)
        expected[0, row, own.start : own.stop] = True
    assert torch.equal(expected, diagonal_map(geometry, tile_q, tile_k))
