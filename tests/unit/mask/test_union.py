"""The union of masks on different grids, each kind with each, against the OR of their dense forms."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from helpers.build import int32, make
from sparseprefill.mask.mask import SparseMask

CALL = make(60, 70, batch=2, starts=int32(0, 13))
KINDS = ("tiles", "stripes", "both")


def random(kind: str, tile: tuple[int, int], group: int, seed: int) -> SparseMask:
    g, source = CALL.geometry, torch.Generator().manual_seed(seed)
    shape = (g.batch, g.heads)
    chosen = torch.rand(*shape, g.tile_rows(tile[0]), g.tile_columns(tile[1]), generator=source) < 0.3
    columns = torch.rand(*shape, g.tile_rows(tile[0] * group), g.kv_len, generator=source) < 0.2
    tiles = SparseMask.from_tiles(CALL, chosen, tile, diagonal=False)
    stripes = SparseMask.from_stripes(CALL, columns, group, tile, diagonal=False)
    if kind == "both":
        return SparseMask(g, *tile, tiles.tiles, group, stripes.stripes)
    return tiles if kind == "tiles" else stripes


@pytest.mark.parametrize(("one", "other"), product(KINDS, KINDS))
@pytest.mark.parametrize("grid", [((8, 8), 2), ((8, 16), 3), ((16, 4), 1), ((12, 5), 2), ((24, 8), 1)])
def test_union_is_the_or(one: str, other: str, grid: tuple[tuple[int, int], int]) -> None:
    a, b = random(one, (8, 8), 2, seed=1), random(other, *grid, seed=2)
    expected = a.to_dense() | b.to_dense()
    assert not torch.equal(a.to_dense(), expected)
    assert not torch.equal(b.to_dense(), expected)
    for union in (a | b, b | a):
        union.check()
        assert torch.equal(expected, union.to_dense())
        assert expected.sum() / (CALL.geometry.visible().sum() * 2) == pytest.approx(union.density)
