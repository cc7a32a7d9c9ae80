"""Unions and differences of masks: exact for any grids, tiles and stripes, and disjoint from what was taken away."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.build import int32, make, random_mask
from sparseprefill.call import AttentionCall
from sparseprefill.mask.mask import SparseMask
from sparseprefill.testing import calls, masks

CALLS = calls(max_len=80, max_heads=4, head_dims=(1,))
DATA = st.data()
KINDS = ("tiles", "stripes", "both")


@given(call=CALLS, data=DATA)
def test_difference_is_the_and_not_of_the_dense_forms(call: AttentionCall, data: st.DataObject) -> None:
    a, b = data.draw(masks(call)), data.draw(masks(call, diagonal=False))
    left = a - b
    assert torch.equal(a.to_dense() & ~b.to_dense(), left.to_dense())
    left.check()
    assert int((left.to_dense() & b.to_dense()).sum()) == 0


@given(call=CALLS, data=DATA)
def test_difference_and_its_subtrahend_unite_to_the_union(call: AttentionCall, data: st.DataObject) -> None:
    a, b = data.draw(masks(call)), data.draw(masks(call))
    assert torch.equal((a | b).to_dense(), ((a - b) | b).to_dense())
    assert not bool((a - a).to_dense().any())
    assert not bool((a - SparseMask.full(call, 24)).to_dense().any())
    assert torch.equal(a.to_dense(), (a - SparseMask.empty(call, 16)).to_dense())
    assert not bool((SparseMask.empty(call, 16) - a).to_dense().any())


CALL = make(60, 70, batch=2, starts=int32(0, 13))


@pytest.mark.parametrize(("one", "other"), product(KINDS, KINDS))
@pytest.mark.parametrize("grid", [((8, 8), 2), ((8, 16), 3), ((16, 4), 1), ((12, 5), 2), ((24, 8), 1)])
def test_each_kind_with_each(one: str, other: str, grid: tuple[tuple[int, int], int]) -> None:
    a, b = random_mask(CALL, one, (8, 8), 2, seed=1), random_mask(CALL, other, *grid, seed=2)
    for left, right in ((a, b), (b, a)):
        first, second = left.to_dense(), right.to_dense()
        assert not torch.equal(first, first | second)
        for expected, found in ((first | second, left | right), (first & ~second, left - right)):
            found.check()
            assert torch.equal(expected, found.to_dense())
            assert expected.sum() / (CALL.geometry.visible().sum() * 2) == pytest.approx(found.density)


def test_tiles_alone_stay_tiles() -> None:
    left = random_mask(CALL, "tiles", (8, 8), 1, seed=1) - random_mask(CALL, "tiles", (16, 4), 1, seed=2)
    assert left.stripes is None
    assert left.tile_q == 8
    assert left.tile_k == 4
