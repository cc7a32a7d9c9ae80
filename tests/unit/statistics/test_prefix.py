"""Statistics kept from chunk to chunk of a request: all are what is made afresh, and what is read is new."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import sparseprefill as sp
from helpers.build import int32
from sparseprefill.memory import KEPT_BYTES, PrefixTiles
from sparseprefill.parts.split import Part

HEADS, KV_HEADS, WIDTH = 4, 2, 3
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


class Sums:
    """A statistic for tests: sums of key tiles up to the call's last query, in float64. read: keys of each making."""

    def __init__(self, tile: int) -> None:
        self.tile, self.read = tile, list[int]()

    def of(self, prefix: PrefixTiles, call: sp.AttentionCall) -> Tensor:
        return prefix.get(call, ("sum", self.tile), self.tile, lambda kept, tiles: self.make(call, kept, tiles))

    def make(self, call: sp.AttentionCall, kept: Tensor | None = None, tiles: int = 0) -> Tensor:
        end = call.geometry.q_offset + call.geometry.q_len
        k = call.k[:, :, tiles * self.tile : end]
        self.read.append(k.shape[2])
        rows = functional.pad(
            k, (0, 0, 0, call.geometry.tile_columns(self.tile) * self.tile - tiles * self.tile - k.shape[2])
        )
        new = rows.unflatten(2, (-1, self.tile)).sum(3)
        return new if kept is None else torch.cat([kept[:, :, :tiles], new], 2)


def request(total: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries and keys of a whole request."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, total, WIDTH), (1, KV_HEADS, total, WIDTH))
    q, k = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k


def chunk(made: tuple[Tensor, Tensor], first: int, end: int, **fields: Any) -> sp.AttentionCall:
    """Its tokens `first` to `end`, as hosts have them: keys in a tensor of their own, which ends with the chunk."""
    q, k = made[0][:, :, first:end], made[1][:, :, :end].clone()
    return sp.AttentionCall(q, k, k, **fields)


def bounds(lengths: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@given(lengths=LENGTHS, tile=st.integers(1, 17), seed=st.integers(0, 9))
def test_chunks_of_any_sizes_have_what_is_made_afresh_and_read_what_is_new(
    lengths: list[int], tile: int, seed: int
) -> None:
    made, prefix, sums = request(sum(lengths), seed), PrefixTiles(), Sums(tile)
    for first, end in bounds(lengths):
        call = chunk(made, first, end, prompt_lengths=sum(lengths))
        found = sums.of(prefix, call)
        assert sums.read.pop() <= end - first + tile - 1, "its own tokens, and those of the tile that they go on with"
        assert torch.equal(sums.make(call), found)


@given(
    lengths=st.lists(LENGTHS, min_size=2, max_size=3), layers=st.integers(1, 2), tile=st.integers(1, 9), data=st.data()
)
def test_requests_and_layers_in_between_change_nothing(
    lengths: list[list[int]], layers: int, tile: int, data: st.DataObject
) -> None:
    sums, todo = Sums(tile), []
    for i, one in enumerate(lengths):
        made = [request(sum(one), 10 * i + layer) for layer in range(layers)]
        todo.append((PrefixTiles(), made, bounds(one)))
    while todo:
        prefix, made, steps = todo[data.draw(st.integers(0, len(todo) - 1))]
        first, end = steps.pop(0)
        for layer in range(layers):
            call = chunk(made[layer], first, end, layer=layer)
            assert torch.equal(sums.make(call), sums.of(prefix, call))
        todo = [one for one in todo if one[2]]


@given(
    spots=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=2, max_size=8), tile=st.integers(1, 9)
)
def test_calls_in_any_order_whatever_changed_behind_them(spots: list[tuple[int, int]], tile: int) -> None:
    """A request that goes back has other keys from there on; one that leaves tokens out had them computed elsewhere."""
    prefix, sums, made, behind = PrefixTiles(), Sums(tile), request(80), 0
    for number, (first, length) in enumerate(spots):
        if first < behind:
            q, k = request(80, number)
            made = (torch.cat([made[0][:, :, :first], q[:, :, first:]], 2),
                    torch.cat([made[1][:, :, :first], k[:, :, first:]], 2))  # fmt: skip
        behind = first + length
        call = chunk(made, first, behind)
        assert torch.equal(sums.make(call), sums.of(prefix, call))


@given(lengths=LENGTHS, order=st.permutations(range(2)), tile=st.integers(1, 9))
def test_two_layers_with_one_index_are_told_apart(lengths: list[int], order: list[int], tile: int) -> None:
    prefix, sums = PrefixTiles(), Sums(tile)
    made = [request(sum(lengths), seed) for seed in range(2)]
    for first, end in bounds(lengths):
        for layer in order:
            call = chunk(made[layer], first, end, prompt_lengths=sum(lengths))
            assert torch.equal(sums.make(call), sums.of(prefix, call))


def test_the_first_chunk_behind_a_cached_prefix_reads_it_once() -> None:
    prefix, sums, made = PrefixTiles(), Sums(8), request(100)
    for first, end in ((64, 80), (80, 90), (90, 100)):
        sums.of(prefix, chunk(made, first, end))
    assert [80, 10, 12] == sums.read


def test_tokens_that_nobody_asked_for_are_read_later() -> None:
    prefix, sums, made = PrefixTiles(), Sums(8), request(100)
    for first, end in ((16, 32), (70, 80)):  # between them a chunk ran dense
        sums.of(prefix, chunk(made, first, end))
    assert [32, 48] == sums.read


def test_stages_that_ask_for_the_same_of_one_call_are_no_calls_out_of_order() -> None:
    prefix, sums, made = PrefixTiles(), Sums(8), request(100)
    sums.of(prefix, chunk(made, 16, 32))
    call = chunk(made, 32, 60)
    for _ in range(2):
        assert torch.equal(sums.make(call), sums.of(prefix, call))
    sums.of(prefix, chunk(made, 60, 70))
    assert [32, 60, 28, 60, 28, 14] == sums.read


def test_of_a_prompt_in_one_piece_nothing_is_kept() -> None:
    prefix, sums, made = PrefixTiles(), Sums(8), request(100)
    sums.of(prefix, chunk(made, 0, 64))
    assert 0 == prefix.nbytes
    sums.of(prefix, chunk(made, 64, 72))
    assert 9 * KV_HEADS * WIDTH * 8 == prefix.nbytes
    sums.of(PrefixTiles(), chunk(made, 0, 64, prompt_lengths=64))
    assert [64, 72, 64] == sums.read


def test_what_was_handed_out_is_not_written_to() -> None:
    prefix, sums, made = PrefixTiles(), Sums(8), request(100)
    before = sums.of(prefix, chunk(made, 8, 20))
    was = before.clone()
    sums.of(prefix, chunk(made, 20, 40))
    assert torch.equal(was, before)


def kept(call: sp.AttentionCall, prefix: PrefixTiles | None = None) -> int:
    prefix = PrefixTiles() if prefix is None else prefix
    found = Sums(8).of(prefix, call)
    assert torch.equal(Sums(8).make(call), found)
    return prefix.nbytes


def test_calls_of_which_nothing_is_kept() -> None:
    plain = chunk(request(40), 20, 40)
    assert 0 < kept(plain)
    assert 0 == kept(evolve(plain, starts=int32(0)))
    assert 0 == kept(evolve(plain, lengths=int32(40)))
    assert 0 == kept(evolve(plain, k=plain.k.clone().requires_grad_()))
    with torch.no_grad():
        assert 0 < kept(evolve(plain, k=plain.k.clone().requires_grad_()))
    assert 0 == kept(plain, PrefixTiles(0))
    assert 0 == kept(plain, PrefixTiles(steady=False))


def test_bytes_have_a_bound() -> None:
    """Layers that come first are kept; for the others it is as if there were nothing."""
    sums, each = Sums(8), 5 * KV_HEADS * WIDTH * 8
    prefix = PrefixTiles(2 * each)
    made = [request(60, layer) for layer in range(3)]
    for first, end in ((20, 40), (40, 60)):
        for layer in range(3):
            call = chunk(made[layer], first, end, layer=layer)
            assert torch.equal(sums.make(call), sums.of(prefix, call))
            assert prefix.nbytes <= 2 * each
    # Pairs: made afresh to compare, and asked for. What did not fit is read as far as what is kept does not reach.
    assert [40, 40] * 3 + [60, 20] * 2 + [60, 60] == sums.read


def test_parts_by_heads_and_layers_cut_anew() -> None:
    prefix, sums, made = PrefixTiles(), Sums(8), request(100)
    halves = [Part((0, 2), (0, 20)), Part((2, 4), (0, 20))]
    for first, cut in ((20, halves), (40, halves), (60, [Part((0, 4), (0, 20))]), (80, halves)):
        whole = chunk(made, first, first + 20)
        for part in cut:
            call = part.of(whole)
            assert torch.equal(sums.make(call), sums.of(prefix, call))
        columns = whole.geometry.tile_columns(8)
        assert columns * KV_HEADS * WIDTH * 8 == prefix.nbytes, "of no head twice"


def test_parts_by_rows_are_chunks() -> None:
    prefix, sums, made = PrefixTiles(), Sums(8), request(64)
    whole = chunk(made, 0, 64)
    for rows in ((0, 32), (32, 64)):
        sums.of(prefix, Part((0, 4), rows).of(whole))
    assert [32, 32] == sums.read


@pytest.mark.parametrize("change", ["dtype", "batch", "heads"])
def test_tensors_of_another_kind_begin_anew(change: str) -> None:
    prefix, sums, made = PrefixTiles(), Sums(8), request(100)
    sums.of(prefix, chunk(made, 20, 40))
    call = chunk(made, 40, 60)
    if change == "dtype":
        call = evolve(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
    elif change == "batch":
        call = evolve(call, **{name: getattr(call, name).repeat(2, 1, 1, 1) for name in ("q", "k", "v")})
    else:
        call = evolve(call, first_head=HEADS)
    assert torch.equal(sums.make(call), sums.of(prefix, call))
    assert [40, 60, 60] == sums.read


def test_a_memory_counts_frees_and_copies_it_empty() -> None:
    memory = sp.Memory()
    call = chunk(request(40), 20, 40)
    assert kept(call, memory.prefix) == memory.nbytes > 0
    assert 0 == len(memory)
    copies = (memory.copy(), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)))
    assert [0, 0, 0] == [one.nbytes for one in copies]
    memory.clear()
    assert 0 == memory.nbytes


def test_a_pipeline_says_how_much() -> None:
    plain, memory = sp.build("streaming"), sp.Memory()
    assert KEPT_BYTES == plain.kept_bytes
    call = chunk(request(40), 20, 40)
    evolve(plain, kept_bytes=7).plan(call, memory)
    assert 7 == memory.prefix.most
