"""Pooling, sampling and selection: the pieces that estimators share."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.build import int32, make
from sparseprefill.metrics import dense_lse
from sparseprefill.statistics.pooled import tile_mean
from sparseprefill.statistics.sampled import last_rows, sampled_mass
from sparseprefill.statistics.select import top_mass
from sparseprefill.statistics.slashes import slash_tiles
from sparseprefill.testing import allowed_pairs


@pytest.mark.parametrize("rows", [{}, {"starts": int32(0, 13)}, {"lengths": int32(20, 3)}])
@pytest.mark.parametrize("tile", [1, 4, 7, 64])
def test_tile_mean_is_over_the_real_rows(rows: dict[str, Any], tile: int) -> None:
    call = make(20, batch=2, **rows)
    geometry = call.geometry
    pooled = tile_mean(call.q, geometry, tile)
    for b in range(2):
        for row, number in enumerate(geometry.tiles(tile)[b].tolist()):
            inside = (geometry.query_positions()[b] // tile == number) & geometry.real_queries()[b]
            mean = call.q[b, :, inside].mean(1) if bool(inside.any()) else torch.zeros(2, 8)
            torch.testing.assert_close(pooled[b, :, row], mean)


def test_last_rows_of_a_padded_batch() -> None:
    index, real = last_rows(make(10, batch=2, lengths=int32(10, 2)), 3)
    assert [7, 8, 9] == index[0].tolist()
    assert [0, 1] == index[1][real[1]].tolist()


@pytest.mark.parametrize("fields", [{}, {"window": 9}, {"softcap": 2.0}, {"starts": int32(0, 13)}])
def test_sampled_mass_sums_columns_and_diagonals(fields: dict[str, Any]) -> None:
    call = make(20, 26, batch=2, dtype=torch.float64, **fields)
    rows, real = last_rows(call, 5)
    mass = sampled_mass(call, rows, real, 4, chunk=7)
    logits = call.q @ call.k.expand(-1, 2, -1, -1).transpose(-1, -2) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    weights = torch.softmax(logits.masked_fill(~allowed_pairs(call)[:, None], -torch.inf), -1)
    start = [0, 0] if call.starts is None else call.starts.tolist()
    for b in range(2):
        picked = weights[b, :, rows[b][real[b]]]
        columns = torch.zeros(2, 26, dtype=torch.float64)
        columns[:, : 26 - start[b]] = picked.sum(1)[:, start[b] :]
        torch.testing.assert_close(mass.columns[b], columns)
        lag = (rows[b][real[b]] + 6)[:, None] - torch.arange(26)
        slashes = torch.stack([picked[:, (lag >= 0) & (lag // 4 == s)].sum(-1) for s in range(7)], -1)
        torch.testing.assert_close(mass.slashes[b], slashes)


def test_sampled_mass_by_blocks_of_columns_and_up_to_a_key() -> None:
    """Blocks lie on the row's own grid; the LSE is that of every key; keys that no row sees may be left out."""
    call = make(20, 26, batch=2, dtype=torch.float64, starts=int32(0, 13))
    rows, real = last_rows(call, 5)
    fine, coarse = (sampled_mass(call, rows, real, 4, column=column) for column in (1, 4))
    padded = torch.nn.functional.pad(fine.columns, (0, 2)).unflatten(-1, (7, 4)).sum(-1)
    torch.testing.assert_close(padded, coarse.columns)
    index = rows[0]
    torch.testing.assert_close(dense_lse(call, index)[0], coarse.lse[0])
    early = sampled_mass(call, rows - 10, real, 4)
    bounded = sampled_mass(call, rows - 10, real, 4, until=16)
    torch.testing.assert_close(early.columns, bounded.columns)
    torch.testing.assert_close(early.slashes, bounded.slashes)


def test_slash_tiles_of_several_sets() -> None:
    """Each query tile follows the set that governs it; the diagonal tile is kept by all."""
    geometry = make(32, 40).geometry  # query tiles 2 to 9 of 4 tokens, 10 key tiles
    slashes = torch.zeros(1, 2, 2, 10, dtype=torch.bool)
    slashes[:, :, 0, 1], slashes[:, 0, 1, 4] = True, True
    part = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    found = slash_tiles(geometry, slashes, 4, part)[0]
    for head, expected in ((0, {0, 4, 5}), (1, {0})):
        for row in range(8):
            lags = {row + 2 - int(c) for c in found[head, row].nonzero()}
            assert ({0, 1, 2} if row < 4 else expected) == lags
    one = slash_tiles(geometry, slashes[:, :, 0], 4)
    assert torch.equal(slash_tiles(geometry, slashes[:, :, :1], 4, torch.zeros_like(part)), one)


def test_top_mass_includes_the_crossing_entry() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert [False, True, False, False] == top_mass(scores, 0.4).tolist()
    assert [False, True, False, True] == top_mass(scores, 0.5).tolist()
    assert [True] * 4 == top_mass(scores, 1.0).tolist()
    assert [False] * 4 == top_mass(scores, 0.0).tolist()


def test_top_mass_breaks_ties_by_order() -> None:
    assert [True, True, False, False] == top_mass(torch.ones(4), 0.5).tolist()
