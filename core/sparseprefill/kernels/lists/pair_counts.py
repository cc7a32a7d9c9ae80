"""Pairs that a mask selects, two launches: stripes in each tile's columns, then the pairs of each query tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.lists.maps import Lists
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.steps import batch_row, count_up_to, floor_div
from sparseprefill.mask.geometry import Geometry

BLOCK = 512
"""Entries of a list that a program takes at once."""


class Rows(NamedTuple):
    """Real query rows [first, behind) of a query tile, by position, and the sliding window, if any."""

    first: Any
    behind: Any
    window: Any


@triton.jit
def _below(indices_ptr, count, bound, steps):
    """Number of entries < bound in an ascending list, for each entry of `bound`. 2 ** steps > count."""
    low = bound * 0
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        entry = tl.load(indices_ptr + middle, mask=middle < high, other=0)  # [BLOCK]
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
def _pairs(key, rows, width: tl.constexpr, WINDOW: tl.constexpr):
    """int64: allowed pairs of the query rows with the keys [key, key + width)."""
    key = key.to(tl.int64)
    pairs = _ramp(rows.behind - key, width) - _ramp(rows.first - key, width)
    if WINDOW:
        pairs = pairs - _ramp(rows.behind - rows.window - key, width) + _ramp(rows.first - rows.window - key, width)
    return pairs


@triton.jit(do_not_specialize=("columns", "steps"))
def held_kernel(
    counts_ptr, offsets_ptr, indices_ptr, held_ptr, columns, steps, TILE_K: tl.constexpr, BLOCK: tl.constexpr
):
    """held ``[lists, columns]``: how many stripes of a list lie in each key tile, of TILE_K columns of theirs (ours).

    One program: BLOCK key tiles of one list, each with two binary searches.
    """
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
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out ``[batch * heads, tile_rows]``: allowed pairs that lists of tiles and of stripes select (ours).

    One program: one query tile of one head. The pairs of a key tile are a difference of ramps; stripes at the causal
    edge, and at a window's far edge, are looked at one by one, and those between only counted. GROUP: query tiles of a
    query tile group, which has one list of stripes. WIDTH: keys of a stripe. held_ptr: given where a tile may hold stripes, whose pairs count
    once; see `held_kernel`.
    """
    program = tl.program_id(0)
    head, row = program // tile_rows, program % tile_rows
    _, length, position = batch_row(head // heads, starts_ptr, lengths_ptr, q_offset, kv_len)
    tile = floor_div(position, TILE_Q) + row
    first = tl.maximum(tl.maximum(tile * TILE_Q, position), 0)
    behind = tl.maximum(tl.minimum(tl.minimum((tile + 1) * TILE_Q, position + q_len), length), first)
    rows = Rows(first, behind, window)
    number_of_rows = behind - first
    # Every row sees the keys [low, high), on the grid of key tiles.
    low, high = number_of_rows * 0, (first + 1) // TILE_K * TILE_K
    if WINDOW:
        low = tl.maximum(behind - 1 - window + TILE_K, 0) // TILE_K * TILE_K
        high = tl.maximum(low, high)
    number = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    inner = number_of_rows.to(tl.int64) * 0
    group = floor_div(tile, GROUP) - floor_div(position, TILE_Q * GROUP)
    group = tl.minimum(tl.maximum(group, 0), group_rows - 1)
    list_of_stripes = head.to(tl.int64) * group_rows + group
    tiles_ptr, count = tile_indices_ptr, number_of_rows * 0
    if tile_indices_ptr is not None:
        tiles_ptr = tile_indices_ptr + tl.load(tile_offsets_ptr + program)
        count = tl.load(tile_counts_ptr + program)
        for slot in range(0, count, BLOCK):
            there = slot + number < count
            entry = tl.load(tiles_ptr + slot + number, mask=there, other=0)  # [BLOCK]
            total += tl.where(there, _pairs(entry * TILE_K, rows, TILE_K, WINDOW), 0)
            if held_ptr is not None:
                unmasked = there & (entry * TILE_K >= low) & (entry * TILE_K < high)
                held = tl.load(held_ptr + list_of_stripes * columns + entry, mask=unmasked, other=0)  # [BLOCK]
                total -= held.to(tl.int64) * WIDTH * number_of_rows
    if stripe_indices_ptr is not None:
        offset, some = tl.load(stripe_offsets_ptr + list_of_stripes), tl.load(stripe_counts_ptr + list_of_stripes)
        begin = count_up_to(stripe_indices_ptr, offset, some, low // WIDTH - 1)
        end = count_up_to(stripe_indices_ptr, offset, some, high // WIDTH - 1)
        inner = (end - begin).to(tl.int64) * WIDTH * number_of_rows
        for edge in tl.static_range(2 if WINDOW else 1):
            at, last = end, count_up_to(stripe_indices_ptr, offset, some, floor_div(behind - 1, WIDTH))
            if edge == 1:
                at = count_up_to(stripe_indices_ptr, offset, some, floor_div(first - window + 1, WIDTH) - 1)
                last = begin
            for slot in range(at, last, BLOCK):
                there = slot + number < last
                key = tl.load(stripe_indices_ptr + offset + slot + number, mask=there, other=0) * WIDTH  # [BLOCK]
                if held_ptr is not None:
                    place = _below(tiles_ptr, count, key // TILE_K, steps)
                    found = tl.load(tiles_ptr + place, mask=there & (place < count), other=-1)  # [BLOCK]
                    there = there & (found != key // TILE_K)
                total += tl.where(there, _pairs(key, rows, WIDTH, WINDOW), 0)
    tl.store(out_ptr + program, tl.sum(total, 0) + inner)


def pair_counts(
    geometry: Geometry, sizes: tuple[int, int, int, int], tiles: Lists | None, stripes: Lists | None, *,
    disjoint: bool = False,
) -> Tensor:  # fmt: skip
    """int64 ``[B, Hq, R]``, by query tile: allowed pairs of `tiles`, lists by query tile, and of `stripes`, each once.

    sizes: tokens of a query tile and of a key tile, query tiles of a query tile group, by which stripes are listed, and
    tokens of a stripe. disjoint: no stripe lies in a listed tile.
    """
    tile_q, tile_k, group, width = sizes
    rows, groups = geometry.tile_rows(tile_q), geometry.tile_rows(tile_q * group)
    columns = geometry.tile_columns(tile_k)
    if tiles is None and stripes is None:
        return torch.zeros(geometry.batch, geometry.heads, 1, dtype=torch.int64, device=geometry.device)
    out = torch.empty(geometry.batch, geometry.heads, rows, dtype=torch.int64, device=geometry.device)
    held = None
    if tiles is not None and stripes is not None and not disjoint:
        counts = stripes[0]
        held = torch.empty(*counts.shape, columns, dtype=torch.int32, device=geometry.device)
        enqueue(held_kernel, (counts.numel(), -(-columns // BLOCK)),
            *_packed(stripes), held, columns, geometry.kv_len.bit_length(),
            TILE_K=tile_k // width, BLOCK=BLOCK, num_warps=4, **FUSED,
        )  # fmt: skip
    enqueue(pair_counts_kernel, (out.numel(),),
        *_packed(tiles), *_packed(stripes), held, geometry.starts, geometry.lengths, out,
        geometry.q_offset, geometry.q_len, geometry.kv_len, rows, groups, columns, columns.bit_length(),
        geometry.window or 0, geometry.heads,
        TILE_Q=tile_q, TILE_K=tile_k, GROUP=group, WIDTH=width, WINDOW=geometry.window is not None,
        BLOCK=BLOCK, num_warps=4, **FUSED,
    )  # fmt: skip
    return out


def _packed(lists: Lists | None) -> tuple[Tensor | None, ...]:
    """Counts and offsets without gaps, which heads that share them have."""
    return (None, None, None) if lists is None else (lists[0].contiguous(), lists[1].contiguous(), lists[2])
