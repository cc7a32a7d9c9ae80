"""The tiles of highest score, by hand, and how many rows are sorted at a time."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseprefill.refiners.narrow import TOP, highest


@pytest.mark.parametrize(("entries", "rows"), [(1, 1), (59, 1), (60, 2), (119, 3), (120, 4), (1 << 23, 9)])
def test_rows_sorted_at_a_time(entries: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of all heads has 30 entries here, and is the least."""
    seen: list[int] = []
    real = torch.sort

    def sort(given: torch.Tensor, **options: Any) -> Any:
        seen.append(given.shape[2])
        return real(given, **options)

    monkeypatch.setattr(torch, "sort", sort)
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


def test_room_above_every_score() -> None:
    assert torch.finfo(torch.float32).max == 8 * TOP
