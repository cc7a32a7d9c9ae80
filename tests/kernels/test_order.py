"""What programs draw: the longest query blocks first, long ones in pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.device import CUDA, DEVICE
from kernels.requests import mask_of, step_of
from sparseprefill.kernels.attention.together import Together
from sparseprefill.kernels.lists.order import HALVES, LENGTHS, MOST, draws_of_lists, draws_of_requests, most_pieces


def told(made: Tensor) -> list[tuple[int, int, int]]:
    """Item, number of its piece, and how many it has, of each draw."""
    words = made.tolist()
    count = words[0]
    pairs = zip(words[1 : 1 + 2 * count : 2], words[2 : 2 + 2 * count : 2], strict=True)
    return [(item, word & 0xFFFF, word >> 16) for item, word in pairs]


def expected(keys: list[int], least: int, programs: int) -> list[tuple[int, int, int]]:
    """The same, said another way: by a stable sort, of the leading bits where keys are large."""
    share = max(-(-sum(keys) // (HALVES * programs)), least)
    shift = max(0, (max(keys) // LENGTHS.value).bit_length())
    share |= (1 << shift) - 1
    found = []
    for i in sorted(range(len(keys)), key=lambda i: -(keys[i] >> shift)):
        pieces = max(1, -(-keys[i] // share))
        found += [(i, number, pieces) for number in range(pieces)]
    return found


def draws(keys: Tensor, least: int, programs: int, room: int = 0) -> Tensor:
    """Of blocks of one head, whose lists have these lengths."""
    made = draws_of_lists(keys.flip(0)[None, None].to(DEVICE), None, 0, 1, least, programs, room)
    assert made.room.tolist() == [0] * room
    return made.words.cpu()


@settings(max_examples=40 if CUDA else 15)
@given(
    count=st.sampled_from([1, 63, 64, 65, 127, 128, 257, 599]),
    most=st.sampled_from([0, 1, 7, 1 << 18, 1 << 21]),
    few=st.integers(0, 20),
    least=st.sampled_from([1, 5, 1000]),
    programs=st.sampled_from([1, 3, 132]),
    room=st.sampled_from([0, 4, 512, 2136]),
    seed=st.integers(0, 99),
)
def test_longest_come_first_and_equals_in_their_order(
    count: int, most: int, few: int, least: int, programs: int, room: int, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, most + 1, (count,), dtype=torch.int32, generator=source)
    keys[few:] //= 50  # some are much longer than the rest
    found = told(draws(keys, least, programs, room))
    assert found == expected(keys.tolist(), least, programs)
    cut = [pieces for _, number, pieces in found if pieces > 1 and number == 0]
    assert sum(cut) <= most_pieces(programs)
    assert all(pieces > 1 for *_, pieces in found[: sum(cut)])  # so states are numbered as draws are


def test_what_is_cut_comes_first_where_lengths_rank_alike() -> None:
    """Of such lengths the lowest bits do not count; the second is one longer than a share would be."""
    keys = torch.tensor([1 << 19, (1 << 19) + 1, 1 << 20], dtype=torch.int32)
    pieces = [count for *_, count in told(draws(keys, 1 << 19, 4))]
    assert sorted(pieces, key=lambda count: count == 1) == pieces


@pytest.mark.parametrize("ratio", [0, 8])
def test_lists_of_a_head_are_numbered_from_its_last_block(ratio: int) -> None:
    """Two blocks share a list; beside it another may stand, whose entries weigh more."""
    counts, more = (torch.randint(0, 50, (2, 3, 5), dtype=torch.int32) for _ in range(2))
    made = draws_of_lists(counts.to(DEVICE), more.to(DEVICE) if ratio else None, ratio, 2, 20, 4)
    lengths = (counts + ratio * more).repeat_interleave(2, dim=2).flip(2).flatten().tolist()
    assert told(made.words.cpu()) == expected(lengths, 20, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1536, 4096, 7919, MOST])
def test_as_many_as_calls_have(count: int) -> None:
    keys = torch.randint(0, 2000, (count,), dtype=torch.int32)
    keys[17] = 1 << 20
    assert told(draws(keys, 1, 132)) == expected(keys.tolist(), 1, 132)


@settings(max_examples=40 if CUDA else 10)
@given(
    sizes=st.lists(st.sampled_from([(1, 1), (127, 700), (128, 128), (129, 1021), (700, 1500)]), min_size=2, max_size=4),
    kind=st.sampled_from(["full", "tiles", "stripes", "both", "wide"]),
    tile=st.sampled_from([(128, 128), (256, 128)]),
    group=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_blocks_of_requests_are_as_long_as_their_lists(
    sizes: list[tuple[int, int]], kind: str, tile: tuple[int, int], group: int, seed: int
) -> None:
    """Lists of stripes may serve several query tiles; those of other requests lie elsewhere."""
    calls = step_of(sizes, heads=4, kv_heads=2, seed=seed, device=DEVICE)
    masks = [mask_of(call, kind, tile, group, seed + i) for i, call in enumerate(calls)]
    requests, per = Together.of(calls, masks), tile[0] // 128
    first, blocks, ratio = masks[0], requests.tile_rows * per, tile[1] // masks[0].stripe_width
    items, lengths = list[int](), list[int]()
    for number, (call, mask) in enumerate(zip(calls, masks, strict=True)):
        every = mask.regrouped(1)
        rows = call.geometry.tile_rows(tile[0])
        for head in range(4):
            for block in reversed(range(rows * per)):
                found = 0 if every.tiles is None else int(every.tiles.counts[0, head, block // per])
                if every.stripes is not None:
                    found = found * ratio + int(every.stripes.counts[0, head, block // per])
                items.append((number * 4 + head) * blocks + blocks - 1 - block)
                lengths.append(found)
    lists = requests.lists[0]
    counts, more = (lists[3], lists[0]) if first.stripes is not None else (lists[0], None)
    assert counts is not None
    named = torch.tensor(items, dtype=torch.int32, device=DEVICE)
    of = (first.stripes is not None, tile[0], first.group)
    made = draws_of_requests(requests.table, named, counts, more, (blocks, per, ratio, 4), of, 3, 4)
    assert told(made.words.cpu()) == [(items[i], *rest) for i, *rest in expected(lengths, 3, 4)]
