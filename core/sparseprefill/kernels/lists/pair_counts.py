"""Pairs that a mask selects, two launches: stripes in each tile's columns, then the pairs of each query tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.steps import count_up_to, floor_div

if TYPE_CHECKING:
    from sparseprefill.mask.lists import IndexLists
    from sparseprefill.mask.mask import SparseMask

BLOCK = 512


@triton.jit
def _below(indices_ptr, count, bound, steps):
    """How many entries of an ascending list are < bound, for each entry of `bound`. 2 ** steps > count."""
    low = bound * 0
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        entry = tl.load(indices_ptr + middle, mask=middle < high, other=0)
        less = (middle < high) & (entry < bound)
        high = tl.where(less, high, middle)
        low = tl.where(less, middle + 1, low)
    return low


@triton.jit
def _ramp(n, width: tl.constexpr):
    """Sum of clamp(t, 0, width) over t = 1..n."""
    n = tl.maximum(n, 0)
    low = tl.minimum(n, width)
    return low * (low + 1) // 2 + (n - low) * width


@triton.jit
def _pairs(key, first, behind, window, width: tl.constexpr, WINDOW: tl.constexpr):
    """int64: allowed pairs of the query rows [first, behind) with the keys [key, key + width)."""
    key = key.to(tl.int64)
    pairs = _ramp(behind - key, width) - _ramp(first - key, width)
    if WINDOW:
        pairs = pairs - _ramp(behind - window - key, width) + _ramp(first - window - key, width)
    return pairs


@triton.jit(do_not_specialize=("columns", "steps"))
def held_kernel(
    counts_ptr, offsets_ptr, indices_ptr, held_ptr, columns, steps, TILE_K: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: some key tiles of one list of stripes."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    indices_ptr += tl.load(offsets_ptr + row)
    count = tl.load(counts_ptr + row)
    held = _below(indices_ptr, count, (column + 1) * TILE_K, steps) - _below(indices_ptr, count, column * TILE_K, steps)
    tl.store(held_ptr + row.to(tl.int64) * columns + column, held, mask=column < columns)


@triton.jit(
    do_not_specialize=(
        "q_offset", "q_len", "kv_len", "tile_rows", "group_rows", "columns", "steps", "window", "heads",
    )
)  # fmt: skip
def pair_counts_kernel(
    tile_counts_ptr, tile_offsets_ptr, tile_indices_ptr, stripe_counts_ptr, stripe_offsets_ptr, stripe_indices_ptr,
    held_ptr, starts_ptr, lengths_ptr, out_ptr,
    q_offset, q_len, kv_len, tile_rows, group_rows, columns, steps, window, heads,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_TILES: tl.constexpr, HAS_STRIPES: tl.constexpr, DEDUPE: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_LENGTHS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one query tile of one head. Stripes at the edges are looked at, those between only counted."""
    program = tl.program_id(0)
    head, row = program // tile_rows, program % tile_rows
    start = 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + head // heads)
    length = kv_len - start
    if HAS_LENGTHS:
        length = tl.load(lengths_ptr + head // heads)
    position = q_offset - start
    tile = floor_div(position, TILE_Q) + row
    first = tl.maximum(tl.maximum(tile * TILE_Q, position), 0)
    behind = tl.maximum(tl.minimum(tl.minimum((tile + 1) * TILE_Q, position + q_len), length), first)
    rows = behind - first
    # Every row sees the keys [low, high), on the grid of key tiles.
    low, high = rows * 0, (first + 1) // TILE_K * TILE_K
    if WINDOW:
        low = tl.maximum(behind - 1 - window + TILE_K, 0) // TILE_K * TILE_K
        high = tl.maximum(low, high)
    number = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    inner = rows.to(tl.int64) * 0
    tiles_ptr, count = tile_indices_ptr, rows * 0
    if HAS_TILES:
        tiles_ptr = tile_indices_ptr + tl.load(tile_offsets_ptr + program)
        count = tl.load(tile_counts_ptr + program)
    group = floor_div(tile, GROUP) - floor_div(position, TILE_Q * GROUP)
    group = tl.minimum(tl.maximum(group, 0), group_rows - 1)
    list_of_stripes = head.to(tl.int64) * group_rows + group
    for slot in range(0, count, BLOCK):
        there = slot + number < count
        entry = tl.load(tiles_ptr + slot + number, mask=there, other=0)
        total += tl.where(there, _pairs(entry * TILE_K, first, behind, window, TILE_K, WINDOW), 0)
        if DEDUPE:
            whole = there & (entry * TILE_K >= low) & (entry * TILE_K < high)
            held = tl.load(held_ptr + list_of_stripes * columns + entry, mask=whole, other=0)
            total -= held.to(tl.int64) * rows
    if HAS_STRIPES:
        offset, some = tl.load(stripe_offsets_ptr + list_of_stripes), tl.load(stripe_counts_ptr + list_of_stripes)
        begin = count_up_to(stripe_indices_ptr, offset, some, low - 1)
        end = count_up_to(stripe_indices_ptr, offset, some, high - 1)
        inner = (end - begin).to(tl.int64) * rows
        for edge in tl.static_range(2 if WINDOW else 1):
            at, last = end, count_up_to(stripe_indices_ptr, offset, some, behind - 1)
            if edge == 1:
                at, last = count_up_to(stripe_indices_ptr, offset, some, first - window), begin
            for slot in range(at, last, BLOCK):
                there = slot + number < last
                key = tl.load(stripe_indices_ptr + offset + slot + number, mask=there, other=0)
                if DEDUPE:
                    place = _below(tiles_ptr, count, key // TILE_K, steps)
                    found = tl.load(tiles_ptr + place, mask=there & (place < count), other=-1)
                    there = there & (found != key // TILE_K)
                total += tl.where(there, _pairs(key, first, behind, window, 1, WINDOW), 0)
    tl.store(out_ptr + program, tl.sum(total, 0) + inner)


def pair_counts(mask: SparseMask, tiles: IndexLists | None) -> Tensor:
    """int64 ``[B, Hq]``: allowed pairs of the mask's stripes and of `tiles`, each once."""
    geometry, stripes = mask.geometry, mask.stripes
    rows, groups = geometry.tile_rows(mask.tile_q), geometry.tile_rows(mask.group_rows)
    columns = geometry.tile_columns(mask.tile_k)
    out = torch.zeros(geometry.batch, geometry.heads, rows, dtype=torch.int64, device=geometry.device)
    dedupe = tiles is not None and stripes is not None and not mask.disjoint
    held = out
    if dedupe and stripes is not None:
        lists = _lists(stripes)
        held = torch.empty(*stripes.counts.shape, columns, dtype=torch.int32, device=geometry.device)
        grid = (stripes.counts.numel(), triton.cdiv(columns, BLOCK))
        held_kernel[grid](
            *lists, held, columns, geometry.kv_len.bit_length(), TILE_K=mask.tile_k, BLOCK=BLOCK, num_warps=4
        )
    if tiles is None and stripes is None:
        return out.sum(-1)
    pair_counts_kernel[(out.numel(),)](
        *_lists(tiles or stripes), *_lists(stripes or tiles), held, geometry.starts, geometry.lengths, out,
        geometry.q_offset, geometry.q_len, geometry.kv_len, rows, groups, columns, columns.bit_length(),
        geometry.window or 0, geometry.heads,
        TILE_Q=mask.tile_q, TILE_K=mask.tile_k, GROUP=mask.group,
        HAS_TILES=tiles is not None, HAS_STRIPES=stripes is not None, DEDUPE=dedupe,
        HAS_STARTS=geometry.starts is not None, HAS_LENGTHS=geometry.lengths is not None,
        WINDOW=geometry.window is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out.sum(-1)


def _lists(lists: IndexLists | None) -> tuple[Tensor, ...]:
    return () if lists is None else (lists.counts.contiguous(), lists.offsets.contiguous(), lists.indices)
