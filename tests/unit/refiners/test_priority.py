"""Priorities: on other grids, without a method's word, clamped, and the highest of them in chunks of rows."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pytest
import torch

import sparseprefill as sp
from helpers.build import int32, make
from sparseprefill.refiners import priority as priorities
from sparseprefill.refiners.priority import NOTE, TOP, highest, priority

CALL = make(24)
PLAN = sp.Plan(sp.SparseMask.full(CALL, 8))


def noted(scores: torch.Tensor, tile_q: int = 8, tile_k: int = 8) -> sp.Plan:
    return sp.Plan(PLAN.mask, notes={NOTE: sp.TilePriority(scores, tile_q, tile_k)})


@pytest.mark.parametrize("note", [{}, {NOTE: "nonsense"}, {"other": 3}])
def test_without_a_word_of_the_method_the_nearer_is_higher(note: dict[str, object]) -> None:
    found = priority(sp.Plan(PLAN.mask, notes=note), CALL.geometry, 8, 4)
    assert [[[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]]] == found.tolist()
    assert torch.float32 == found.dtype
    assert "tile-priority" == NOTE


@pytest.mark.parametrize(
    ("given", "dtype"), [(torch.float64, torch.float64), (torch.float16, torch.float32), (torch.float32, torch.float32)]
)
def test_scores_are_finite_and_leave_room_above(given: torch.dtype, dtype: torch.dtype) -> None:
    row = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=given)
    found = priority(noted(row.expand(1, 2, 3, 3)), CALL.geometry, 8, 8)
    assert dtype == found.dtype
    assert [TOP, -TOP, 0.0] == found[0, 1, 2].tolist()
    assert torch.finfo(torch.float32).max == 8 * TOP


def test_a_tile_takes_the_score_at_its_first_query_and_key() -> None:
    call = make(24, 40)
    scores = torch.arange(2 * 2 * 3.0).reshape(1, 2, 2, 3)  # query tiles of 16 from position 16, key tiles of 16
    found = sp.TilePriority(scores, 16, 16).on(call.geometry, 8, 8)
    assert [[0, 0, 1, 1, 2]] * 2 + [[3, 3, 4, 4, 5]] == found[0, 0].tolist()
    wide = sp.TilePriority(scores, 16, 16).on(call.geometry, 16, 12)
    assert [[6, 6, 7, 8], [9, 9, 10, 11]] == [row[:4] for row in wide[0, 1].tolist()]
    few = sp.TilePriority(scores[..., :2], 16, 16).on(call.geometry, 16, 16)
    assert [[0, 1, 1], [2 + 1, 4, 4]] == few[0, 0].tolist()


def test_padded_rows_stand_on_grids_of_their_own() -> None:
    call = make(16, batch=2, starts=int32(0, 4))
    geometry = call.geometry
    scores = torch.arange(geometry.tile_rows(8)).float()[:, None].expand(2, 2, -1, 2)
    found = sp.TilePriority(scores, 8, 8).on(geometry, 4, 8)[:, 0, :, 0]
    for b in range(2):
        first = geometry.first_tile(8)[b]
        assert [min(int(tile) // 2 - int(first), 2) for tile in geometry.tiles(4)[b]] == found[b].tolist()


@pytest.mark.parametrize(("entries", "rows"), [(1, 1), (59, 1), (60, 2), (119, 3), (120, 4), (1 << 23, 9)])
def test_rows_sorted_at_a_time(entries: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of all heads has 30 entries here, and is the least."""
    seen: list[int] = []
    real = priorities._highest

    def spy(scores: torch.Tensor, candidates: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        seen.append(candidates.shape[2])
        return real(scores, candidates, number)

    monkeypatch.setattr(priorities, "_highest", spy)
    found = highest(torch.arange(5.0), torch.ones(2, 3, 9, 5) > 0, torch.full((2, 3, 9), 2), entries)
    assert (rows, 9) == (seen[0], sum(seen))
    assert [False, False, False, True, True] == found[1, 2, 8].tolist()


@pytest.mark.parametrize(
    ("scores", "candidates", "number", "expected"),
    [
        ([1, 3, 2, 0], [1, 1, 1, 1], 2, [0, 1, 1, 0]),
        ([1, 3, 2, 0], [1, 0, 1, 1], 2, [1, 0, 1, 0]),
        ([1, 1, 1, 1], [1, 1, 1, 1], 1, [0, 0, 0, 1]),
        ([1, 1, 1, 1], [1, 1, 1, 0], 2, [0, 1, 1, 0]),
        ([-TOP, -TOP, 0, 8 * TOP], [1, 1, 0, 0], 3, [1, 1, 0, 0]),
        ([1, 3, 2, 0], [1, 1, 1, 1], 0, [0, 0, 0, 0]),
        ([1, 3, 2, 0], [1, 1, 1, 1], -3, [0, 0, 0, 0]),
        ([1, 3, 2, 0], [1, 1, 1, 1], 9, [1, 1, 1, 1]),
    ],
)
def test_the_highest_by_hand(scores: list[float], candidates: list[int], number: int, expected: list[int]) -> None:
    keep = torch.tensor(candidates)[None, None, None] > 0
    found = highest(torch.tensor(scores, dtype=torch.float32), keep, torch.tensor([[[number]]]))
    assert [bool(one) for one in expected] == found[0, 0, 0].tolist()
