"""The union of masks on different grids, each kind with each, against the OR of their dense forms."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from helpers.build import int32, make, random_mask

CALL = make(60, 70, batch=2, starts=int32(0, 13))
KINDS = ("tiles", "stripes", "both")


@pytest.mark.parametrize(("one", "other"), product(KINDS, KINDS))
@pytest.mark.parametrize("grid", [((8, 8), 2), ((8, 16), 3), ((16, 4), 1), ((12, 5), 2), ((24, 8), 1)])
def test_union_is_the_or(one: str, other: str, grid: tuple[tuple[int, int], int]) -> None:
    a, b = random_mask(CALL, one, (8, 8), 2, seed=1), random_mask(CALL, other, *grid, seed=2)
    expected = a.to_dense() | b.to_dense()
    assert not torch.equal(a.to_dense(), expected)
    assert not torch.equal(b.to_dense(), expected)
    for union in (a | b, b | a):
        union.check()
        assert torch.equal(expected, union.to_dense())
        assert expected.sum() / (CALL.geometry.visible().sum() * 2) == pytest.approx(union.density)
