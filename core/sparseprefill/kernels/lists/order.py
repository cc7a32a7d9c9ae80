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


@triton.jit(do_not_specialize=("count",))
def longest_first_kernel(keys_ptr, order_ptr, count, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """order ``[count]``: the numbers of the entries of keys ``[count]``, the largest first; of equals the first first.

    One program: BLOCK entries, each of which is put behind all that come before it. Compares every pair, which up to
    some ten thousand entries costs less than a sort's launches.
    """
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + mine, mask=mine < count, other=0)[:, None]  # [BLOCK, 1]
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        theirs = tl.load(keys_ptr + other, mask=other < count, other=0)[None, :]
        before = (theirs > key) | ((theirs == key) & (other[None, :] < mine[:, None]))
        place += tl.sum((before & (other < count)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + place, mine, mask=mine < count)


def longest_first(keys: Tensor) -> Tensor:
    """int32 ``[n]``: what ``argsort(keys, descending=True, stable=True)`` gives. keys: int32 ``[n]``, contiguous."""
    order = torch.empty(keys.shape, dtype=torch.int32, device=keys.device)
    programs = cdiv(keys.numel(), BLOCK)
    enqueue(longest_first_kernel, (programs,),
        keys, order, keys.numel(), BLOCK=BLOCK, AT_ONCE=AT_ONCE, num_warps=4, **FUSED,
    )  # fmt: skip
    return order


@cache
def prepare(device: torch.device) -> None:
    """Compile the kernel: once lists are uneven, which a server's first calls need not be, nobody waits for it."""
    longest_first(torch.zeros(BLOCK, dtype=torch.int32, device=device))
