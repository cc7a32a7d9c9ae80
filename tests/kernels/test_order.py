"""What programs draw: the longest query blocks first, long ones in pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.device import CUDA, DEVICE
from sparseprefill.kernels.lists.order import HALVES, LENGTHS, draws, draws_of_lists, most_pieces


def told(made: Tensor) -> list[tuple[int, int, int]]:
    """Item, number of its piece, and how many it has, of each draw."""
    words = made.tolist()
    count = words[0]
    pairs = zip(words[1 : 1 + 2 * count : 2], words[2 : 2 + 2 * count : 2], strict=True)
    return [(item, word & 0xFFFF, word >> 16) for item, word in pairs]


def expected(keys: list[int], items: list[int], least: int, programs: int) -> list[tuple[int, int, int]]:
    """The same, said another way: by a stable sort, of the leading bits where keys are large."""
    share = max(-(-sum(keys) // (HALVES * programs)), least)
    shift = max(0, (max(keys) // LENGTHS.value).bit_length())
    share |= (1 << shift) - 1
    found = []
    for i in sorted(range(len(keys)), key=lambda i: -(keys[i] >> shift)):
        pieces = max(1, -(-keys[i] // share))
        found += [(items[i], number, pieces) for number in range(pieces)]
    return found


@settings(max_examples=40 if CUDA else 15)
@given(
    count=st.sampled_from([1, 63, 64, 65, 127, 128, 257, 599]),
    most=st.sampled_from([0, 1, 7, 1 << 18, 1 << 21]),
    few=st.integers(0, 20),
    least=st.sampled_from([1, 5, 1000]),
    programs=st.sampled_from([1, 3, 132]),
    named=st.booleans(),
    seed=st.integers(0, 99),
)
def test_longest_come_first_and_equals_in_their_order(
    count: int, most: int, few: int, least: int, programs: int, named: bool, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, most + 1, (count,), dtype=torch.int32, generator=source)
    keys[few:] //= 50  # some are much longer than the rest
    items = torch.randperm(count, generator=source).to(torch.int32) + 7 if named else None
    made = draws(keys.to(DEVICE), None if items is None else items.to(DEVICE), least, programs)
    names = list(range(count)) if items is None else items.tolist()
    found = told(made.cpu())
    assert found == expected(keys.tolist(), names, least, programs)
    cut = [pieces for _, number, pieces in found if pieces > 1 and number == 0]
    assert sum(cut) <= most_pieces(programs)
    assert all(pieces > 1 for *_, pieces in found[: sum(cut)])  # so states are numbered as draws are


def test_what_is_cut_comes_first_where_lengths_rank_alike() -> None:
    """Of such lengths the lowest bits do not count; the second is one longer than a share would be."""
    keys = torch.tensor([1 << 19, (1 << 19) + 1, 1 << 20], dtype=torch.int32)
    pieces = [count for *_, count in told(draws(keys.to(DEVICE), None, 1 << 19, 4).cpu())]
    assert sorted(pieces, key=lambda count: count == 1) == pieces


@pytest.mark.parametrize("ratio", [0, 8])
def test_lists_of_a_head_are_numbered_from_its_last_block(ratio: int) -> None:
    """Two blocks share a list; beside it another may stand, whose entries weigh more."""
    counts, more = (torch.randint(0, 50, (2, 3, 5), dtype=torch.int32) for _ in range(2))
    made = draws_of_lists(counts.to(DEVICE), more.to(DEVICE) if ratio else None, ratio, 2, 20, 4)
    lengths = (counts + ratio * more).repeat_interleave(2, dim=2).flip(2).flatten().tolist()
    assert told(made.cpu()) == expected(lengths, list(range(60)), 20, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1536, 4096, 9973, 16384])
def test_as_many_as_calls_have(count: int) -> None:
    keys = torch.randint(0, 2000, (count,), dtype=torch.int32, device=DEVICE)
    keys[17] = 1 << 20
    made = draws(keys, None, 1, 132)
    assert told(made) == expected(keys.tolist(), list(range(count)), 1, 132)
