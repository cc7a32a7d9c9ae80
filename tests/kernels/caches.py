"""Calls whose keys and values stand in the pages of a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import evolve

from sparseprefill import AttentionCall
from sparseprefill.pages import Pages

LAYOUTS = {"LBNHC": (0, 2, 1, 3), "LBHNC": (0, 1, 2, 3)}
"""Orders of (page, head, slot, numbers) in memory: heads side by side within a token, or a head's tokens together."""
FP8 = torch.float8_e4m3fn
STORED: dict[str, tuple[torch.dtype, tuple[float, float] | None]] = {
    "e4m3": (torch.float8_e4m3fn, (2.0, 0.5)),
    "e4m3, unscaled": (torch.float8_e4m3fn, None),
    "e4m3, uneven": (torch.float8_e4m3fn, (0.7, 1.3)),
    "e5m2": (torch.float8_e5m2, (0.7, 1.3)),
    "e5m2, unscaled": (torch.float8_e5m2, None),
    "bfloat16": (torch.bfloat16, None),
}
"""What a cache may hold that calls convert as they read it: its type, and the scales of K and V.

Triton's interpreter gets the smallest numbers of e5m2 wrong: compare its kernels with a copy that a kernel made, too.
"""


def paged(
    call: AttentionCall, page: int, layout: str = "LBNHC", seed: int = 0, garbage: float = math.nan
) -> AttentionCall:
    """The call with K and V side by side in pages out of order; all that is not a key or value of it is `garbage`."""
    _, heads, length, size = call.k.shape
    order, count = LAYOUTS[layout], -(-length // page)
    shape = (2 * count + 1, heads, page, 2 * size)
    cache = call.k.new_full([shape[i] for i in order], garbage).permute(order)
    table = torch.randperm(2 * count + 1, generator=torch.Generator().manual_seed(seed))[:count]
    table = table.to(call.k.device, torch.int32)
    token = torch.arange(length, device=table.device)
    cache[table[token // page].long(), :, token % page] = torch.cat([call.k, call.v], -1)[0].transpose(0, 1)
    k, v = cache.transpose(1, 2).split(size, -1)
    pages = Pages(k, v, table, length)
    return evolve(call, k=pages, v=pages)


def in_fp8(
    call: AttentionCall,
    page: int,
    layout: str = "LBNHC",
    stored: torch.dtype = FP8,
    scales: tuple[float, float] | None = (2.0, 0.5),
) -> AttentionCall:
    """The same in an fp8 cache, whose numbers are those of the call over their scale (of K and V), and rounded.

    stored: the cache's type, which may be any that pages take.
    """
    size, (k_scale, v_scale) = call.k.shape[3], scales or (1.0, 1.0)
    made = paged(evolve(call, k=call.k / k_scale, v=call.v / v_scale), page, layout).pages
    assert made is not None
    cache = torch.cat([made.k, made.v], -1).transpose(1, 2).to(stored)
    k, v = cache.transpose(1, 2).split(size, -1)
    factors: dict[str, Any] = {}
    if scales is not None:
        both = torch.tensor(scales, device=k.device)
        factors = {"k_scale": both[:1], "v_scale": both[1:]}
    pages = Pages(k, v, made.table, made.length, dtype=call.q.dtype, **factors)
    return evolve(call, k=pages, v=pages)


def copied(call: AttentionCall) -> AttentionCall:
    """The call with K and V as tensors, copied from other pages than its own, so that these stay unread."""
    pages = call.pages
    assert pages is not None
    there = evolve(pages, cut_from=None, first_head=0)
    return evolve(call, k=there.keys(), v=there.values())


def untouched(call: AttentionCall) -> bool:
    """Whether the call is one of pages of which nothing was copied."""
    return call.pages is not None and not call.pages.gathered
