"""Requests of one step, as a server has them: rows side by side in one tensor, keys in the pages of one cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kernels.caches import LAYOUTS
from sparseprefill import AttentionCall, SparseMask
from sparseprefill.pages import Pages


def step_of(
    sizes: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    layout: str = "LBNHC",
    gap: int = 0,
    seed: int = 0,
    garbage: float = math.nan,
    **fields: Any,
) -> list[AttentionCall]:
    """A call for each (query rows, keys). gap: rows between two requests, of somebody else. fields: of every call.

    All that is no row, key or value of a request is `garbage`.
    """
    source = torch.Generator().manual_seed(seed)
    counts = [-(-keys // page) for _, keys in sizes]
    pages = torch.randperm(sum(counts) + 1, generator=source).split([*counts, 1])[:-1]
    shape, order = (sum(counts) + 1, kv_heads, page, 2 * width), LAYOUTS[layout]
    cache = torch.full([shape[i] for i in order], garbage, dtype=dtype).permute(order)
    tokens = sum(rows for rows, _ in sizes) + gap * len(sizes)
    q = torch.full((tokens, heads, width), garbage, dtype=dtype)
    begin = 0
    for (rows, keys), table in zip(sizes, pages, strict=True):
        q[begin : begin + rows] = torch.randn(rows, heads, width, generator=source).to(dtype)
        at = torch.arange(keys)
        both = torch.randn(keys, kv_heads, 2 * width, generator=source).to(dtype)
        cache[table[at // page], :, at % page] = both
        begin += rows + gap
    q, cache = q.to(device), cache.to(device)
    k, v = cache.transpose(1, 2).split(width, -1)
    made, begin = [], 0
    for (rows, keys), table in zip(sizes, pages, strict=True):
        part = q[begin : begin + rows].transpose(0, 1)[None]
        made.append(AttentionCall.of_pages(part, Pages(k, v, table.to(device, torch.int32), keys), **fields))
        begin += rows + gap
    return made


def mask_of(
    call: AttentionCall, kind: str, tile: tuple[int, int], group: int = 2, seed: int = 0, width: int = 1
) -> SparseMask:
    """Random tiles, stripes, both, or every key; other ones in every head and batch row.

    width: of stripes. Kind "wide" is both, with stripes of 16 keys.
    """
    width = 16 if kind == "wide" else width
    if kind == "full":
        return SparseMask.full(call, tile)
    g, source = call.geometry, torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return (torch.rand(g.batch, g.heads, rows, columns, generator=source) < 0.4).to(g.device)

    tiles = SparseMask.from_tiles(call, drawn(g.tile_rows(tile[0]), g.tile_columns(tile[1])), tile)
    columns = drawn(g.tile_rows(group * tile[0]), g.tile_columns(width))
    stripes = SparseMask.from_stripes(call, columns, group, tile, width=width, diagonal=False)
    return {"tiles": tiles, "stripes": stripes, "both": tiles | stripes, "wide": tiles | stripes}[kind]


def long_mask(call: AttentionCall, kind: str) -> SparseMask:
    """The same kinds for calls of many thousand keys: a tenth of the tiles, stripes for groups of 16."""
    if kind == "full":
        return SparseMask.full(call)
    g = call.geometry
    shape = 1, g.heads, g.tile_rows(128), g.tile_columns(128)
    tiles = SparseMask.from_tiles(call, torch.rand(shape, device=g.device) < 0.1)
    stripes = mask_of(call, "stripes", (128, 128), 16, call.kv_len, 16 if kind == "wide" else 1)
    return {"tiles": tiles, "stripes": stripes}.get(kind, tiles | stripes)
