"""The order in which blocks of unequal work are drawn: one launch, where a sort takes a host ten."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED, cdiv

BLOCK, AT_ONCE = 64, 256
"""Entries of a program, and others that each is compared with at once."""


@triton.jit
def _key(keys_ptr, more_ptr, entry, count, blocks, per, ratio):
    """The keys of some entries, 0 behind the last. blocks: 0, or query blocks of a head, whose last one is its first
    entry; `per` of them share a list, of which keys are counts, and `more` counts of what weighs `ratio` as much."""
    at = entry
    if blocks > 0:
        at = (entry // blocks) * (blocks // per) + (blocks - 1 - entry % blocks) // per
    key = tl.load(keys_ptr + at, mask=entry < count, other=0)
    if more_ptr is not None:
        key += ratio * tl.load(more_ptr + at, mask=entry < count, other=0)
    return key


@triton.jit(do_not_specialize=("count", "blocks", "per", "ratio"))
def longest_first_kernel(
    keys_ptr, more_ptr, order_ptr, count, blocks, per, ratio, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """order ``[count]``: the numbers of the entries of keys (see `_key`), the largest first; of equals the first first.

    One program: BLOCK entries, each of which is put behind all that come before it. Compares every pair, which up to
    some ten thousand entries costs less than a sort's launches.
    """
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = _key(keys_ptr, more_ptr, mine, count, blocks, per, ratio)[:, None]  # [BLOCK, 1]
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        theirs = _key(keys_ptr, more_ptr, other, count, blocks, per, ratio)[None, :]
        before = (theirs > key) | ((theirs == key) & (other[None, :] < mine[:, None]))
        place += tl.sum((before & (other < count)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + place, mine, mask=mine < count)


def longest_first(keys: Tensor) -> Tensor:
    """int32 ``[n]``: what ``argsort(keys, descending=True, stable=True)`` gives. keys: int32 ``[n]``, contiguous."""
    return _ordered(keys, None, keys.numel(), 0, 1, 0)


def longest_lists_first(counts: Tensor, more: Tensor | None, ratio: int, per: int) -> Tensor:
    """int32 ``[B * H * R * per]``: the query blocks of all heads, those with the longest lists first; of a head the last
    block is numbered first (`work.query_block`). counts: int32 ``[B, H, R]``, of the lists. more: likewise, of lists whose
    entries weigh `ratio` as much; or None. per: query blocks that share a list."""
    flat = None if more is None else more.contiguous()
    return _ordered(counts.contiguous(), flat, counts.numel() * per, counts.shape[2] * per, per, ratio)


def _ordered(keys: Tensor, more: Tensor | None, count: int, blocks: int, per: int, ratio: int) -> Tensor:
    order = torch.empty(count, dtype=torch.int32, device=keys.device)
    enqueue(longest_first_kernel, (cdiv(count, BLOCK),),
        keys, more, order, count, blocks, per, ratio, BLOCK=BLOCK, AT_ONCE=AT_ONCE, num_warps=4, **FUSED,
    )  # fmt: skip
    return order


@cache
def prepare(device: torch.device) -> None:
    """Compile the kernel: once lists are uneven, which a server's first calls need not be, nobody waits for it."""
    counts = torch.zeros(1, 1, BLOCK, dtype=torch.int32, device=device)
    for more in (None, counts):
        longest_lists_first(counts, more, 1, 1)
