"""Algorithms 2 to 4 on the device: which heads share, run dense or neither, their tiles, and new pivots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.sampled.diagonals import COLUMNS, ROWS, on_diagonals
from sparseprefill.kernels.settings import FUSED, cdiv, power_of_two
from sparseprefill.kernels.statistics.distance import js_distance, js_terms, seen_blocks
from sparseprefill.kernels.steps import batch_row, floor_div
from sparseprefill.mask.geometry import Geometry

from .heads import NEVER

FAR = tl.constexpr(1 << 30)


@triton.jit(
    do_not_specialize=(
        "q_offset", "q_len", "kv_len", "count", "window", "layer", "batch", "heads", "clusters", "columns",
    )
)  # fmt: skip
def choose_kernel(
    blocks_ptr, own_ptr, choice_ptr, codes_ptr, made_ptr, last_ptr, starts_ptr, lengths_ptr, tau, delta,
    q_offset, q_len, kv_len, count, window, layer, batch, heads, clusters, columns,
    BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, NEVER: tl.constexpr,
    SUMS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """choice ``[3, batch, heads]``: shares, runs dense, either (Algorithm 3). One program: all heads of a batch row.

    A head shares its cluster's pivot where it lies near (below tau), and may run dense where it is far from uniform
    attention, within delta; both by Jensen-Shannon distance. made_ptr, last_ptr: of the pivots, or None for none yet.
    blocks: ``[batch, heads, columns]``, shares or, with SUMS, sums that become shares in `own`.
    """
    b = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)
    code = tl.load(codes_ptr + h, mask=h < heads, other=-1).to(tl.int32)  # [BLOCK_H]
    cluster = tl.maximum(code, 0) // 2
    line = (b * heads + h).to(tl.int64) * columns
    pivot = (b * clusters + cluster).to(tl.int64) * columns
    low, high = seen_blocks(
        b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, count, window, BLOCK, WINDOW
    )  # fmt: skip
    even = 1.0 / tl.maximum(tl.minimum(high, columns - 1) - low + 1, 1).to(tl.float32)
    nothing = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    mass = nothing
    if SUMS:
        for first in range(0, columns, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            there = (h < heads)[:, None] & (c < columns)[None, :]
            mass += tl.load(blocks_ptr + line[:, None] + c[None, :], mask=there, other=0.0)  # [BLOCK_H, BLOCK_C]
    whole = tl.sum(mass, 1)
    whole = tl.where(whole == 0.0, 1.0, whole)
    far, near = nothing, nothing
    for first in range(0, columns, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        there = (h < heads)[:, None] & (c < columns)[None, :]
        own = tl.load(blocks_ptr + line[:, None] + c[None, :], mask=there, other=0.0)  # [BLOCK_H, BLOCK_C]
        if SUMS:
            own = own / whole[:, None]
            tl.store(own_ptr + line[:, None] + c[None, :], own, mask=there)
        uniform = tl.where(((c >= low) & (c <= high))[None, :] & there, even, 0.0)
        far += js_terms(own, uniform)
        if last_ptr is not None:
            other = tl.load(last_ptr + pivot[:, None] + c[None, :], mask=there, other=0.0)  # [BLOCK_H, BLOCK_C]
            near += js_terms(own, other)
    able = (code >= 0) & (js_distance(tl.sum(far, 1)) < delta)
    makes = able & (code % 2 == 1)
    share = code < -1
    if made_ptr is not None:
        made = tl.load(made_ptr + b * clusters + cluster)  # [BLOCK_H]
        share = able & (made < layer) & (js_distance(tl.sum(near, 1)) < tau)
        makes = makes & (made >= NEVER - layer)
    # Of a cluster's heads the first that may make its pivot does.
    before = (h[:, None] < h[None, :]) & (cluster[:, None] == cluster[None, :]) & makes[:, None]
    dense = makes & (tl.max(before.to(tl.int32), 0) == 0)
    out = choice_ptr + b * heads + h
    tl.store(out, share.to(tl.uint8), mask=h < heads)
    tl.store(out + batch * heads, dense.to(tl.uint8), mask=h < heads)
    tl.store(out + 2 * batch * heads, (share | dense).to(tl.uint8), mask=h < heads)


@triton.jit(do_not_specialize=("q_offset", "batch", "heads", "clusters", "bins", "rows", "columns"))
def pattern_tiles_kernel(
    slashes_ptr, choice_ptr, codes_ptr, packed_ptr, starts_ptr, keep_ptr,
    q_offset, batch, heads, clusters, bins, rows, columns,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """keep ``[batch * heads, rows, columns]``: all tiles, those of the cluster's pivot, or those of slashes.

    Algorithm 4, by the choice of Algorithm 3. One program: BLOCK_R query tiles by BLOCK_C key tiles of one head.
    """
    bh = tl.program_id(2)
    b, h = bh // heads, bh % heads
    _, _, first = batch_row(b, starts_ptr, None, q_offset, 0)
    dense = tl.load(choice_ptr + batch * heads + bh)
    # Heads of another pattern lie out of reach of their diagonals.
    hidden = tl.load(choice_ptr + 2 * batch * heads + bh).to(tl.int32) * FAR
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    lag = (floor_div(first, BLOCK) + row)[:, None] - column[None, :]  # [BLOCK_R, BLOCK_C]
    keep = on_diagonals(slashes_ptr + bh.to(tl.int64) * bins, lag, bins, inside & (lag > hidden))
    keep = tl.where(lag == hidden, 1, keep).to(tl.uint8) | dense
    if packed_ptr is not None:
        reach = tl.where(tl.load(choice_ptr + bh) != 0, columns, 0)
        cluster = tl.maximum(tl.load(codes_ptr + h).to(tl.int32), 0) // 2
        line = ((b * clusters + cluster).to(tl.int64) * rows + row) * tl.cdiv(columns, 8)
        bits = tl.load(
            packed_ptr + line[:, None] + column[None, :] // 8, mask=inside & (column < reach)[None, :], other=0
        )
        keep |= (bits >> (column % 8)[None, :].to(tl.uint8)) & 1
    tl.store(keep_ptr + (bh.to(tl.int64) * rows + row[:, None]) * columns + column[None, :], keep, mask=inside)


@triton.jit
def _maker(dense_ptr, codes_ptr, b, cluster, heads, BLOCK_H: tl.constexpr):
    """The cluster's head that runs dense, BLOCK_H where none does."""
    h = tl.arange(0, BLOCK_H)
    code = tl.load(codes_ptr + h, mask=h < heads, other=-1).to(tl.int32)  # [BLOCK_H]
    dense = tl.load(dense_ptr + b * heads + h, mask=h < heads, other=0) != 0  # [BLOCK_H]
    mine = dense & (code >= 0) & (code // 2 == cluster)
    return tl.min(tl.where(mine, h, BLOCK_H), 0)


@triton.jit(do_not_specialize=("layer", "heads", "clusters", "slots", "rows", "columns"))
def pivot_update_kernel(
    dense_ptr, whole_ptr, codes_ptr, which_ptr, own_ptr, tiles_ptr, old_made_ptr, old_last_ptr, old_packed_ptr,
    made_ptr, last_ptr, packed_ptr, layer, heads, clusters, slots, rows, columns,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
    NEVER: tl.constexpr,
):  # fmt: skip
    """made, last and packed of `Pivots`: those of a head that ran dense and is whole, else the old ones (Algorithm 2).

    One program: BLOCK_R rows of one cluster's pattern, packed to a bit per tile; the first one of a cluster does the rest.

    own ``[batch, heads, columns]``, tiles ``[batch, slots, rows, columns]`` of the clusters `which` ``[slots]``.
    """
    bk = tl.program_id(1)
    b, cluster = bk // clusters, bk % clusters
    s = tl.arange(0, BLOCK_S)
    mine = tl.load(which_ptr + s, mask=s < slots, other=-1).to(tl.int32) == cluster  # [BLOCK_S]
    slot = tl.max(tl.where(mine, s, -1), 0)
    head = _maker(dense_ptr, codes_ptr, b, cluster, heads, BLOCK_H)
    ran = (slot >= 0) & (head < BLOCK_H)
    fresh = tl.load(whole_ptr + b * heads + head, mask=ran, other=0) != 0
    width = tl.cdiv(columns, 8)
    new, kept = tl.where(fresh, columns, 0), tl.where(fresh, 0, columns)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    line = tiles_ptr + ((b * slots + slot).to(tl.int64) * rows + row)[:, None] * columns
    place = (bk.to(tl.int64) * rows + row)[:, None] * width
    for first in range(0, width, BLOCK_W):
        byte = first + tl.arange(0, BLOCK_W)
        inside = (row < rows)[:, None] & (byte < width)[None, :]
        bits = tl.zeros([BLOCK_R, BLOCK_W], tl.int32)
        for bit in tl.static_range(8):
            column = (byte * 8 + bit)[None, :]
            tile = tl.load(line + column, mask=inside & (column < new), other=0)  # [BLOCK_R, BLOCK_W]
            bits |= tile.to(tl.int32) << bit
        if old_packed_ptr is not None:
            bits |= tl.load(
                old_packed_ptr + place + byte[None, :], mask=inside & (byte * 8 < kept)[None, :], other=0
            ).to(tl.int32)
        tl.store(packed_ptr + place + byte[None, :], bits.to(tl.uint8), mask=inside)
    if tl.program_id(0) == 0:
        made = NEVER
        if old_made_ptr is not None:
            made = tl.load(old_made_ptr + bk)
        tl.store(made_ptr + bk, tl.where(ran, tl.where(fresh, layer, NEVER - 1 - layer), made))
        for first in range(0, columns, 1024):
            c = first + tl.arange(0, 1024)
            x = tl.load(own_ptr + (b * heads + head).to(tl.int64) * columns + c, mask=c < new, other=0.0)
            if old_last_ptr is not None:
                x += tl.load(old_last_ptr + bk.to(tl.int64) * columns + c, mask=c < kept, other=0.0)
            tl.store(last_ptr + bk.to(tl.int64) * columns + c, x, mask=c < columns)


CELLS = 2048
"""Scores of all heads in registers at once."""
PIVOT_ROWS = 8
"""Rows of a pivot's pattern that a program packs."""


def choose(
    geometry: Geometry, blocks: Tensor, count: int, codes: Tensor, pivots: tuple[Tensor, Tensor] | None, layer: int,
    block: int, tau: float, delta: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Flags and own of `pivots.choose`'s `Choice`, from mass by blocks, float32 ``[B, H, C]``.

    count: sampled queries. codes: of `LayerHeads`. pivots: `made` and `last` of `Pivots`.
    """
    batch, number, columns = blocks.shape
    blocks = blocks.contiguous()
    own = torch.empty_like(blocks)
    flags = torch.empty(3, batch, number, dtype=torch.bool, device=blocks.device)
    block_h = max(2, power_of_two(number))
    made, last = pivots or (None, None)
    enqueue(choose_kernel, (batch,),
        blocks, own, flags.view(torch.uint8), codes, made, last,
        geometry.starts, geometry.lengths, float(tau), float(delta),
        geometry.q_offset, geometry.q_len, geometry.kv_len, count, geometry.window or 0,
        layer, batch, number, 1 if made is None else made.shape[1], columns,
        BLOCK=block, BLOCK_H=block_h, BLOCK_C=max(16, CELLS // block_h), NEVER=NEVER, SUMS=True,
        WINDOW=geometry.window is not None, num_warps=8, **FUSED,
    )  # fmt: skip
    return flags, own


def pattern_tiles(
    geometry: Geometry, slashes: Tensor, block: int, flags: Tensor, codes: Tensor, packed: Tensor | None
) -> Tensor:
    """`pivots.pattern_tiles`: bool ``[B, H, R, C]``. flags: of `Choice`. packed: of `Pivots`."""
    batch, number, bins = slashes.shape
    rows, width = geometry.tile_rows(block), geometry.tile_columns(block)
    keep = torch.empty(batch, number, rows, width, dtype=torch.bool, device=slashes.device)
    enqueue(pattern_tiles_kernel, (cdiv(width, COLUMNS), cdiv(rows, ROWS), batch * number),
        slashes.contiguous().view(torch.uint8), flags.view(torch.uint8), codes, packed,
        geometry.starts, keep.view(torch.uint8), geometry.q_offset, batch, number,
        1 if packed is None else packed.shape[1], bins, rows, width,
        BLOCK=block, BLOCK_R=ROWS, BLOCK_C=COLUMNS, num_warps=8, **FUSED,
    )  # fmt: skip
    return keep


def updated(
    old: tuple[Tensor, Tensor, Tensor] | None, layer: int, clusters: int, codes: Tensor, which: Tensor, dense: Tensor,
    whole: Tensor, own: Tensor, tiles: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """made, last and packed of `pivots.renewed`, from `old` ones or nothing. tiles: bool ``[B, S, R, C]``."""
    batch, slots, rows, columns = tiles.shape
    device = tiles.device
    made = torch.empty(batch, clusters, dtype=torch.int32, device=device)
    last = torch.empty(batch, clusters, columns, dtype=own.dtype, device=device)
    packed = torch.empty(batch, clusters, rows, cdiv(columns, 8), dtype=torch.uint8, device=device)
    enqueue(pivot_update_kernel, (cdiv(rows, PIVOT_ROWS), batch * clusters),
        dense.view(torch.uint8), whole.view(torch.uint8), codes, which, own,
        tiles.contiguous().view(torch.uint8), *(old or (None, None, None)), made, last, packed, layer,
        own.shape[1], clusters, slots, rows, columns,
        BLOCK_H=power_of_two(own.shape[1]), BLOCK_S=power_of_two(slots), BLOCK_R=PIVOT_ROWS,
        BLOCK_W=64, NEVER=NEVER, num_warps=4, **FUSED,
    )  # fmt: skip
    return made, last, packed
