"""IndexLists: constructors and what is refused."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pytest
import torch

from sparseprefill.mask.lists import IndexLists


def test_map_and_rows() -> None:
    keep = torch.tensor([[[[1, 0, 1], [0, 0, 0], [1, 1, 1]]]], dtype=torch.bool)
    made = IndexLists.from_map(keep)
    assert [[0, 2], [], [0, 1, 2]] == [made.row(0, 0, row).tolist() for row in range(3)]
    assert torch.equal(keep, made.to_map(3))


def test_ranges_skip_empty_ones() -> None:
    first, last = torch.tensor([[[0, 3, 7], [5, 2, 4]]]), torch.tensor([[[2, 3, 9], [4, 4, 5]]])
    made = IndexLists.from_ranges(first, last, heads=2, width=6)
    assert [[0, 1, 7, 8], [2, 3, 4]] == [made.row(0, 1, row).tolist() for row in range(2)]


def test_empty_lists() -> None:
    assert 0 == int(IndexLists.empty(1, 2, 3, torch.device("cpu")).to_map(4).sum())


def test_on_a_cpu_a_map_is_made_from_lists_no_wider_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = torch.zeros(1, 1, 3, 1000, dtype=torch.bool)
    keep[..., 1, [3, 500]] = True
    made, padded, widths = IndexLists.from_map(keep), IndexLists.padded, []

    def noted(lists: IndexLists, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        widths.append(width)
        return padded(lists, width)

    monkeypatch.setattr(IndexLists, "padded", noted)
    assert torch.equal(keep, made.to_map(1000))
    assert [2] == widths


def test_narrow_is_one_head() -> None:
    keep = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(keep[1:, 2:], IndexLists.from_map(keep)[1:2, 2:3].to_map(5))


def test_entries_behind_a_count_are_never_read() -> None:
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    made = IndexLists(counts, torch.tensor([[[0, 2]]]), torch.tensor([1, 999, 0, 2, -5], dtype=torch.int32))
    assert [[[[False, True, False], [True, False, True]]]] == made.to_map(3).tolist()


def test_shared_storage() -> None:
    counts = torch.tensor([[[1, 3]]], dtype=torch.int32)
    made = IndexLists(counts, torch.tensor([[[2, 0]]]), torch.arange(3, dtype=torch.int32))
    assert [[2], [0, 1, 2]] == [made.row(0, 0, row).tolist() for row in range(2)]
