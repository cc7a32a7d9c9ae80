"""Draws of programs where query blocks are of unequal work: the longest first, those of much work in pieces.

One program that works through a list alone keeps all others waiting at a launch's end: few rows behind a long cache,
of which the last see every key; a whole prompt whose last rows do, or whose last head keeps more than others. So the
longest come first, and a list that is longer than a half of an even share of the launch's work is cut into pieces, as
FlashDecoding and stream-K do (the second cuts everything evenly; here whatever is short stays whole).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.attention.arguments import FIELDS, GROUP_ROWS, Q_OFFSET, STRIPE_LISTS, TILE_LISTS, TILE_ROWS
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED, cdiv
from sparseprefill.kernels.steps import floor_div

BLOCK, AT_ONCE = 16, 512
"""Entries of a program, and others that each is compared with at once: a step's few hundred in one or two goes."""
SHIFT = tl.constexpr(16)
"""Of a word: bits of a piece's number, below those of how many pieces its block has."""
MOST = 1 << 13
"""Entries at most. Each pair of them is compared; and beyond, heads that follow each other, whose keys stay in L2, take
less time than the longest first (docs/performance.md)."""
CLEARED = 512
"""Words of the room that a program sets to zero at once."""
ENTRIES, LENGTHS = tl.constexpr(MOST), tl.constexpr(1 << 18)
"""Of a rank, 31 bits: so many numbers of entries, and above them so many lengths, of longer ones without lowest bits."""
HALVES = 2
"""Pieces that an even share of the work makes at least: with whole shares a launch of equal blocks that are a little
fewer than the programs would find nothing to cut."""


@triton.jit
def _key(
    counts_ptr, more_ptr, items_ptr, table_ptr, entry, count, blocks, per, ratio, heads,
    STRIPES: tl.constexpr, TILE_Q: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Lengths of the lists of some entries, 0 behind the last.

    Of a head's query blocks the last is its first entry; `per` of them share a list of `counts`, and one of `more`,
    whose entries weigh `ratio` as much. With a table (`attention.arguments`) an entry is what `items` names, a query block
    of a request, which has `heads`: `counts` are of tiles, or with STRIPES of these, for GROUP query tiles of TILE_Q rows,
    and `more` of tiles.
    """
    there = entry < count
    if table_ptr is None:
        at = (entry // blocks) * (blocks // per) + (blocks - 1 - entry % blocks) // per
        key = tl.load(counts_ptr + at, mask=there, other=0)
        if more_ptr is not None:
            key += ratio * tl.load(more_ptr + at, mask=there, other=0)
    else:
        item = tl.load(items_ptr + entry, mask=there, other=0)
        head = item // blocks
        row = (blocks - 1 - item % blocks) // per
        of = table_ptr + (head // heads) * FIELDS
        head = (head % heads).to(tl.int64)
        at = tl.load(of + TILE_ROWS) * head + row
        if STRIPES:
            first = tl.load(of + Q_OFFSET).to(tl.int32)
            group = floor_div(floor_div(first, TILE_Q) + row, GROUP)
            group -= floor_div(first, TILE_Q * GROUP)
            stripes = tl.load(of + STRIPE_LISTS) + tl.load(of + GROUP_ROWS) * head + group
            key = tl.load(counts_ptr + stripes, mask=there, other=0)
            if more_ptr is not None:
                key += ratio * tl.load(more_ptr + tl.load(of + TILE_LISTS) + at, mask=there, other=0)
        else:
            key = tl.load(counts_ptr + tl.load(of + TILE_LISTS) + at, mask=there, other=0)
    return key


@triton.jit
def _pieces(key, share):
    """Pieces that lists of these lengths make."""
    return tl.maximum((key + share - 1) // share, 1)


@triton.jit
def _rank(key, entry, shift):
    """A number of 31 bits that no other entry has, larger for what comes first."""
    return (key >> shift) * ENTRIES + (ENTRIES - 1 - entry)


class Draws(NamedTuple):
    """Draws of programs. words: int32 ``[1 + 2 m]``, see `draws_kernel`; what lies behind the last draw says nothing.
    room: int32, zeros, for what the programs count."""

    words: Tensor
    room: Tensor


@triton.jit(
    do_not_specialize=("count", "room", "blocks", "per", "ratio", "heads", "least", "shares"),
    do_not_specialize_on_alignment=("counts_ptr", "more_ptr"),
)  # fmt: skip
def draws_kernel(
    counts_ptr, more_ptr, items_ptr, table_ptr, room_ptr, count, room, blocks, per, ratio, heads, least, shares,
    STRIPES: tl.constexpr, TILE_Q: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
    CLEARED: tl.constexpr,
):  # fmt: skip
    """room: so many zeros, and the draws behind them: how many there are, then two words of each: the item, and its
    piece's number with their count above.

    An entry (see `_key`) is an item, or the one that `items` names; the largest come first, of equals the first first.
    What is longer than a share, an even part of all keys into `shares` and at least `least`, is cut into as many pieces
    as it has shares. One program: BLOCK entries, each of which is put behind all that come before it.
    """
    for low in range(tl.program_id(0) * CLEARED, room, tl.num_programs(0) * CLEARED):
        word = low + tl.arange(0, CLEARED)
        tl.store(room_ptr + word, 0, mask=word < room)
    draws_ptr = room_ptr + room
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([AT_ONCE], tl.int64)
    longest = tl.zeros([AT_ONCE], tl.int32)
    for first in range(0, count, AT_ONCE):
        some = _key(
            counts_ptr, more_ptr, items_ptr, table_ptr, first + tl.arange(0, AT_ONCE), count, blocks, per, ratio, heads,
            STRIPES, TILE_Q, GROUP,
        )  # fmt: skip
        total += some
        longest = tl.maximum(longest, some)
    share = tl.maximum((tl.sum(total, 0) + shares - 1) // shares, least).to(tl.int32)
    limit = tl.max(longest, 0)
    shift = 0
    while (limit >> shift) >= LENGTHS:
        shift += 1
    share |= (1 << shift) - 1  # so that what is cut ranks before all that is not: states are numbered as draws are
    key = _key(
        counts_ptr, more_ptr, items_ptr, table_ptr, mine, count, blocks, per, ratio, heads, STRIPES, TILE_Q, GROUP
    )  # fmt: skip
    rank = _rank(key, mine, shift)
    places = tl.zeros([BLOCK, AT_ONCE], tl.int32)
    whole = tl.zeros([AT_ONCE], tl.int32)
    for first in range(0, count, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        theirs = _key(
            counts_ptr, more_ptr, items_ptr, table_ptr, other, count, blocks, per, ratio, heads, STRIPES, TILE_Q, GROUP
        )  # fmt: skip
        pieces = tl.where(other < count, _pieces(theirs, share), 0)
        whole += pieces
        places += tl.where(_rank(theirs, other, shift)[None, :] > rank[:, None], pieces[None, :], 0)
    item = mine
    if items_ptr is not None:
        item = tl.load(items_ptr + mine, mask=mine < count, other=0)
    pieces = tl.where(mine < count, _pieces(key, share), 0)
    words = draws_ptr + 1 + 2 * tl.sum(places, 1)
    for number in range(tl.max(pieces, 0)):
        tl.store(words + 2 * number, item, mask=number < pieces)
        tl.store(words + 2 * number + 1, number | (pieces << SHIFT), mask=number < pieces)
    if tl.program_id(0) == 0:
        tl.store(draws_ptr, tl.sum(whole, 0))


def most_pieces(programs: int) -> int:
    """Pieces of blocks that are cut, at most: a block of more than a share has fewer than twice as many as its shares."""
    return 2 * HALVES * programs


def draws_of_lists(
    counts: Tensor, more: Tensor | None, ratio: int, per: int, least: int, programs: int, room: int = 0
) -> Draws:
    """Draws of the query blocks of all heads; of a head the last block is numbered first (`work.query_block`).

    counts: int32 ``[B, H, R]``, of the lists. more: likewise, of lists whose entries weigh `ratio` as much; or None. per:
    query blocks that share a list. least: length of the shortest piece. programs: that draw. room: words of it.
    """
    flat = None if more is None else more.contiguous()
    tables = counts.contiguous(), flat, None, None
    sizes = counts.shape[2] * per, per, ratio, 1
    return _made(tables, counts.numel() * per, sizes, (False, 1, 1), least, programs, room)


def draws_of_requests(
    table: Tensor, items: Tensor, counts: Tensor, more: Tensor | None, sizes: tuple[int, int, int, int],
    lists: tuple[bool, int, int], least: int, programs: int, room: int = 0,
) -> Draws:  # fmt: skip
    """The same of the query blocks that several requests have, which `items` names, int32 ``[n]``.

    table: see `attention.arguments`. counts, more: the first request's lists, contiguous. sizes: query blocks of a head,
    those of a query tile, by how much an entry of `more` weighs, and heads. lists: whether `counts` are of stripes, rows of
    a query tile, and query tiles of their group.
    """
    return _made((counts, more, items, table), items.numel(), sizes, lists, least, programs, room)


def _made(
    tensors: tuple[Tensor | None, ...],
    count: int,
    sizes: tuple[int, ...],
    lists: tuple[bool, int, int],
    least: int,
    programs: int,
    room: int,
) -> Draws:
    device = next(x.device for x in tensors if x is not None)
    made = torch.empty(room + 1 + 2 * (count + HALVES * programs), dtype=torch.int32, device=device)
    stripes, tile_q, group = lists
    enqueue(draws_kernel, (cdiv(count, BLOCK),),
        *tensors, made, count, room, *sizes, least, HALVES * programs,
        STRIPES=stripes, TILE_Q=tile_q, GROUP=group, BLOCK=BLOCK, AT_ONCE=AT_ONCE, CLEARED=CLEARED, num_warps=4,
        **FUSED,
    )  # fmt: skip
    return Draws(made[room:], made[:room])


@cache
def prepare(device: torch.device) -> None:
    """Compile the kernel: once lists are uneven, which a server's first calls need not be, nobody waits for it."""
    counts = torch.zeros(1, 1, BLOCK, dtype=torch.int32, device=device)
    for more in (None, counts):
        draws_of_lists(counts, more, 1, 1, 1, 1)
