"""Ways to look at a mask: density, shade, picture."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import torch

from helpers.build import int32, make
from sparseprefill.mask.mask import SparseMask


def test_density_of_a_known_mask() -> None:
    call = make(8)  # 36 causal pairs; diagonal tiles of 4 hold 2 * 10
    mask = SparseMask.from_tiles(call, torch.zeros(2, 2, dtype=torch.bool), 4)
    assert 20 / 36 == mask.density


def test_stripe_density_leaves_tiles_out() -> None:
    call, keep = make(8), torch.zeros(2, 8, dtype=torch.bool)
    keep[1, 0] = keep[1, 5] = True
    mask = SparseMask.from_stripes(call, keep, tile=4)
    assert 24 / 36 == mask.density  # key 5 lies in a diagonal tile and counts once
    assert 7 / 36 == mask.stripe_density


def test_shade_is_the_share_of_allowed_pairs() -> None:
    call = make(8)
    shade = SparseMask.from_tiles(call, torch.zeros(2, 2, dtype=torch.bool), 4).shade(2)[0, 0]
    assert 1 == shade[0, 0]
    assert 0 == shade[1, 0]
    assert 1 == shade[1, 1]
    assert bool(torch.isnan(shade[0, 1]))


def test_shade_agrees_with_the_dense_form() -> None:
    call = make(12, batch=2, starts=int32(0, 3), window=7)
    keep = torch.rand(2, 2, call.geometry.tile_rows(3), 4, generator=torch.Generator().manual_seed(1)) < 0.5
    mask = SparseMask.from_tiles(call, keep, 3)
    chosen = mask.to_dense().view(2, 2, 4, 3, 4, 3).sum((3, 5)).float()
    allowed = call.geometry.visible()[:, None].view(2, 1, 4, 3, 4, 3).sum((3, 5)).float()
    torch.testing.assert_close(mask.shade(4), chosen / allowed, equal_nan=True)


def test_shade_of_few_queries_over_many_keys() -> None:
    """Rows go to cells by the number of queries, columns by that of keys, and every row is looked at."""
    call = make(32, 1024)
    keep = torch.rand(2, 2, 64, generator=torch.Generator().manual_seed(2)) < 0.5
    mask = SparseMask.from_tiles(call, keep, 16)
    chosen = mask.to_dense().view(1, 2, 2, 16, 2, 512).sum((3, 5)).float()
    allowed = call.geometry.visible()[:, None].view(1, 1, 2, 16, 2, 512).sum((3, 5)).float()
    torch.testing.assert_close(mask.shade(2), chosen / allowed)


def test_picture_uses_three_glyphs_and_blanks() -> None:
    call, keep = make(8), torch.zeros(2, 8, dtype=torch.bool)
    keep[1, 0] = True
    picture = SparseMask.from_stripes(call, keep, tile=4).picture(head=1, cells=4)
    assert ["#   ", "##  ", "+.# ", "+.##"] == picture.split("\n")


def test_picture_of_more_cells_than_tokens() -> None:
    lines = SparseMask.full(make(3)).picture(cells=6).split("\n")
    assert ["#     ", "      ", "# #   ", "      ", "# # # ", "      "] == lines
