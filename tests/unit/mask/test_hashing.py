"""The hash bit by bit, in plain integers: the same tiles on every device, for every seed, layer, head and row."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.build import int32, make
from sparseprefill.mask import tile_map as hashing

WORDS = st.integers(0, 2**32 - 1)


def mixed(x: int) -> int:
    """The finalizer of 32 bits by shifts and two odd factors, as published with its constants."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 15


def folded(*words: int) -> int:
    """The golden ratio of 2^32 is added at each word."""
    state = 0
    for word in words:
        state = mixed(((state ^ word % 2**32) + 2654435769) % 2**32)
    return state


@given(words=st.lists(WORDS, min_size=1, max_size=20))
def test_bits_of_integers_and_of_tensors(words: list[int]) -> None:
    assert [mixed(x) for x in words] == [hashing.mix(x) for x in words]
    assert [mixed(x) for x in words] == hashing.mix(torch.tensor(words)).tolist()
    column = torch.tensor(words)
    assert [folded(7, x) for x in words] == hashing.fold(torch.full_like(column, folded(7)), column).tolist()


def test_known_bits() -> None:
    """Written down: a change of code and test together is seen."""
    begun = hashing.layer_hash(1, 0, 0), hashing.layer_hash(2, 2**40 + 3, 5)
    assert (0x86D2FA73, 0x99B5E683, 0x5795660B, 0x9C8CEB48) == (hashing.mix(1), hashing.mix(2**32 - 1), *begun)


@given(seed=st.integers(0, 2**63 - 1), layer=st.integers(0, 200), use=st.sampled_from([1, 2]))
def test_a_seed_counts_with_all_of_its_bits(seed: int, layer: int, use: int) -> None:
    assert folded(use, seed % 2**32, seed >> 32, layer) == hashing.layer_hash(use, seed, layer)
    assert {1, 2} == {hashing.STRIDE, hashing.RANDOM}


@pytest.mark.parametrize("first_head", [None, 3])
def test_rows_of_heads(first_head: int | None) -> None:
    geometry = make(20, batch=2, heads=3, kv_heads=3, starts=int32(0, 9)).geometry
    found = hashing.row_hash(geometry, 8, 77, *([] if first_head is None else [first_head]))
    for b, tiles in enumerate(geometry.tiles(8).tolist()):
        for h in range(3):
            head = mixed(((77 ^ h + (first_head or 0)) + 2654435769) % 2**32)
            rows = [mixed(((head ^ tile % 2**32) + 2654435769) % 2**32) for tile in tiles]
            assert rows == found[b, h].tolist()


@pytest.mark.parametrize(("entries", "rows"), [(1, 1), (59, 1), (60, 2), (89, 2), (90, 3), (1 << 22, 4)])
def test_columns_below_a_bound_in_chunks_of_rows(entries: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of tiles of all heads has 30 entries here, and is the least."""
    states = torch.randint(0, 2**32, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    seen: list[int] = []

    def fold(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        seen.append(state.shape[2])
        return real(state, word)

    real = hashing.fold
    monkeypatch.setattr(hashing, "fold", fold)
    found = hashing.hashed_below(states, 5, 2**31, entries)
    expected = [
        [[[mixed(((s ^ j) + 2654435769) % 2**32) < 2**31 for j in range(5)] for s in head] for head in row]
        for row in states.tolist()
    ]
    assert expected == found.tolist()
    assert (rows, 4) == (seen[0], sum(seen))


def test_the_bound_itself_is_not_below() -> None:
    state = torch.tensor([[[5]]])
    value = mixed((5 ^ 0) + 2654435769)
    assert [[[[[False]]]], [[[[True]]]]] == [
        hashing.hashed_below(state, 1, bound).tolist() for bound in (value, value + 1)
    ]


def test_no_columns() -> None:
    assert (1, 1, 1, 0) == tuple(hashing.hashed_below(torch.tensor([[[5]]]), 0, 9).shape)


def test_four_million_numbers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def fold(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        seen.append(state.shape[2])
        return torch.zeros(1, dtype=torch.int64).expand(*state.shape[:3], len(word))

    monkeypatch.setattr(hashing, "fold", fold)
    hashing.hashed_below(torch.zeros(1, 1, 5, dtype=torch.int64), 1 << 21, 1)
    assert [2, 2, 1] == seen
