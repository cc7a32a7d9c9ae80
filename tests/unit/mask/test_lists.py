"""IndexLists: constructors and what is refused."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pytest
import torch

from sparseprefill.errors import MaskError
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


@pytest.mark.parametrize(
    ("counts", "offsets", "indices", "said"),
    [
        (torch.int64, torch.int64, torch.int32, r"IndexLists\.counts is torch\.int64: pass torch\.int32"),
        (torch.int32, torch.int32, torch.int32, r"IndexLists\.offsets is torch\.int32: pass torch\.int64"),
        (torch.int32, torch.int64, torch.int64, r"IndexLists\.indices is torch\.int64: pass torch\.int32"),
    ],
)
def test_wrong_dtype(counts: torch.dtype, offsets: torch.dtype, indices: torch.dtype, said: str) -> None:
    with pytest.raises(MaskError, match=said):
        IndexLists(*(torch.zeros(s, dtype=d) for s, d in (((1, 1, 1), counts), ((1, 1, 1), offsets), ((1,), indices))))


@pytest.mark.parametrize(
    "shapes", [((1, 1), (1, 1), (1,)), ((1, 1, 2), (1, 1, 1), (1,)), ((1, 1, 1), (1, 1, 1), (1, 1))]
)
def test_wrong_shape(shapes: tuple[tuple[int, ...], ...]) -> None:
    dtypes = (torch.int32, torch.int64, torch.int32)
    with pytest.raises(MaskError, match="IndexLists shapes are"):
        IndexLists(*(torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)))


def test_not_a_tensor() -> None:
    with pytest.raises(MaskError, match=r"IndexLists\.counts is list"):
        IndexLists([1], torch.zeros(1, 1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))  # type: ignore[arg-type]
