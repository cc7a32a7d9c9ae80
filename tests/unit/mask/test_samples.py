"""Stretches: sums over spans, and what belongs to a span given to its query tiles."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import torch

from helpers.build import int32, make
from sparseprefill.mask.samples import deal

GEOMETRY = make(40).geometry
TILES = torch.tensor([[[0, 1, 2, 3, 4], [0, 10, 20, 30, 40]]])


def test_spans_of_two_tiles() -> None:
    """The last one has a tile alone."""
    at = deal(GEOMETRY, 8, 2, 16)
    sums = at.in_spans(TILES)
    assert [[[1, 5, 4], [10, 50, 40]]] == sums.tolist()
    assert [[[1, 1, 5, 5, 4], [10, 10, 50, 50, 40]]] == at.to_tiles(sums).tolist()


def test_tiles_with_a_token() -> None:
    """Positions 4 to 23, of 20 tokens; -9 to 10, of 11."""
    call = make(20, 24, batch=2, starts=int32(0, 13), lengths=int32(20, 11))
    at = deal(call.geometry, 8, 2, None)
    assert [[True, True, True, False], [False, False, True, True]] == at.inhabited.tolist()
    assert [[True, True], [True, True]] == at.real.tolist()
    assert [[15, 19], [7, 10]] == at.position.tolist()
    assert [[11, 15], [16, 19]] == at.rows.tolist()
    assert [[1, 2], [2, 3]] == at.own.tolist()


def test_a_call_of_one_span_takes_no_memory() -> None:
    at = deal(GEOMETRY, 8, 2, None)
    sums = at.in_spans(TILES)
    assert [[[10], [100]]] == sums.tolist()
    found = at.to_tiles(sums)
    assert [[[10] * 5, [100] * 5]] == found.tolist()
    assert sums.data_ptr() == found.data_ptr()
