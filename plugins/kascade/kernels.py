"""Anchor layers on the device: sums of attention by key for each tile, and the lists of those of most of it.

One launch each, nothing read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.family.chips import chip
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.sampled.mass import settings
from sparseprefill.kernels.settings import FUSED, block, cdiv
from sparseprefill.kernels.source import Keys, strides
from sparseprefill.kernels.steps import LOG2E, batch_row, factor, logits, stored_rows
from sparseprefill.mask.lists import IndexLists

from .budget import Rows


@triton.jit(
    do_not_specialize=(
        "tiles", "rows", "kv_heads", "kv_group", "groups", "parts", "chunk", "width", "kv_len", "stride_start",
    ),
    do_not_specialize_on_alignment=("table_ptr", "k_scale_ptr"),
)  # fmt: skip
def column_sums_kernel(
    q_ptr, k_ptr, table_ptr, k_scale_ptr, rows_ptr, base_ptr, begin_ptr, starts_ptr, out_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_start,
    scale, softcap, tiles, rows, kv_heads, kv_group, groups, parts, chunk, width, kv_len,
    TILES: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out ``[B, Hkv, tiles, width]``: exp(logit - LSE) of each key, summed over a tile's rows and the heads of a group
    (Kascade's anchor layers, second pass). Keys at or behind a tile's begin are not its concern, so nothing is masked.

    rows ``[B, tiles, rows]``: index in q. base ``[B, Hq, tiles, rows]``: base-2 LSE less log2 of the row's weight, inf
    for none. begin ``[B, tiles]``. One program: TILES tiles of one KV head, of each PAIRS pairs of a row and a query head
    at a time, so that heads share the keys; one chunk of keys. With PARTS a tile has more pairs, added up in `out`.
    """
    z = tl.program_id(0)
    kv = z // groups % kv_heads
    b = z // groups // kv_heads
    start, _, _ = batch_row(b, starts_ptr, None, 0, 0)
    tile = z % groups * TILES + tl.arange(0, TILES)  # [TILES]
    begin = tl.load(begin_ptr + b.to(tl.int64) * stride_start + tile, mask=tile < tiles, other=0)  # [TILES]
    first = tl.program_id(1) * chunk
    stop = tl.minimum(first + chunk, tl.max(begin, 0).to(tl.int32))
    lane = tl.arange(0, TILES * PAIRS)
    mine = z % groups * TILES + lane // PAIRS  # [TILES * PAIRS]
    k_base = k_ptr + b.to(tl.int64) * stride_kb + kv.to(tl.int64) * stride_kh
    out = out_ptr + ((b * kv_heads + kv) * tiles + tile).to(tl.int64) * width  # [TILES]
    dims = tl.arange(0, BLOCK_D)
    k_scale = factor(k_scale_ptr)
    key = tl.arange(0, BLOCK_N)
    for part in range(0, parts):
        pair = part * PAIRS + lane % PAIRS
        inside = (pair < rows * kv_group) & (mine < tiles)
        row = pair // kv_group
        head = kv * kv_group + pair % kv_group
        index = tl.load(rows_ptr + (b * tiles + mine).to(tl.int64) * rows + row, mask=inside, other=0)
        place = ((b * kv_heads * kv_group + head) * tiles + mine).to(tl.int64) * rows + row
        base = tl.load(base_ptr + place, mask=inside, other=float("inf"))  # [TILES * PAIRS]
        line = q_ptr + b.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + index.to(tl.int64) * stride_qn
        there = inside & (base < float("inf"))
        q = tl.load(
            line[:, None] + dims[None, :], mask=there[:, None] & (dims < D)[None, :], other=0.0
        )  # [TILES * PAIRS, BLOCK_D]
        for j in tl.range(first, stop, BLOCK_N):
            at = j + key
            seen = (at < stop) & (at + start < kv_len)
            k = stored_rows(
                k_base, at + start, seen, stride_kn, table_ptr, stride_kb, k_scale, q.dtype, PAGE, D, BLOCK_D
            )  # [BLOCK_N, BLOCK_D]
            p = tl.math.exp2(logits(k, q, scale, softcap, SOFTCAP, PRECISION) - base[None, :])
            p = tl.where(seen[:, None], p, 0.0)  # [BLOCK_N, TILES * PAIRS]
            total = tl.sum(tl.reshape(p, [BLOCK_N, TILES, PAIRS]), 2)  # [BLOCK_N, TILES]
            where = out[None, :] + at[:, None]
            write = (at < stop)[:, None] & (tile < tiles)[None, :]
            if PARTS:
                total += tl.load(where, mask=write & (part > 0), other=0.0)
            tl.store(where, total, mask=write)
        if PARTS:
            tl.debug_barrier()


@triton.jit
def _bits(ptr, at, size):
    """Bits of sums, which order as they do; NaN and what lies behind are 0."""
    x = tl.load(ptr + at, mask=at < size, other=0.0)
    return tl.where(x > 0.0, x, 0.0).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=("tiles", "every", "first", "heads", "width"))
def top_columns_kernel(
    sums_ptr, begin_ptr, counts_ptr, offsets_ptr, indices_ptr, tiles, every, first, heads, width,
    N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """List for each tile the keys before it whose sums are largest, ascending; of equal ones the first (ours).

    Bisection on the bits of the least sum that is kept, two bits a pass over the row. sums ``[B, heads, tiles, width]``;
    begin ``[B, every]``; counts and offsets ``[B, heads, every]``, of which `tiles` from `first` on are filled. One
    program: one row.
    """
    z = tl.program_id(0)
    bh = z // tiles
    tile = first + z % tiles
    slot = bh.to(tl.int64) * every + tile
    count = tl.load(counts_ptr + slot)
    size = tl.load(begin_ptr + (bh // heads).to(tl.int64) * every + tile).to(tl.int32)
    row = sums_ptr + z.to(tl.int64) * width
    if count > 0:
        at = tl.arange(0, N)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [N, WIDTH]
        low, have, shift = count * 0, size, count * 0 + 29
        while (shift >= 0) & (have != count):
            one = low + (1 << shift)
            two = low + (2 << shift)
            three = low + (3 << shift)
            ones, twos, threes = (tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32))
            for j in range(0, size, N * WIDTH):
                x = _bits(row, j + at, size)
                ones += tl.sum((x >= one).to(tl.int32), 0)
                twos += tl.sum((x >= two).to(tl.int32), 0)
                threes += tl.sum((x >= three).to(tl.int32), 0)
            a, b, c = tl.sum(ones, 0), tl.sum(twos, 0), tl.sum(threes, 0)
            low = tl.where(c >= count, three, tl.where(b >= count, two, tl.where(a >= count, one, low)))
            have = tl.where(c >= count, c, tl.where(b >= count, b, tl.where(a >= count, a, have)))
            shift = tl.where(shift == 1, 0, shift - 2)
        above = tl.zeros([WIDTH], tl.int32)
        for j in range(0, size, N * WIDTH):
            above += tl.sum((_bits(row, j + at, size) > low).to(tl.int32), 0)
        ties = count - tl.sum(above, 0)
        out = indices_ptr + tl.load(offsets_ptr + slot)
        key = tl.arange(0, N * WIDTH)
        written = count * 0
        for j in range(0, size, N * WIDTH):
            x = _bits(row, j + key, size)  # [N * WIDTH]
            tie = ((x == low) & (j + key < size)).to(tl.int32)
            keep = (x > low) | ((tie > 0) & (tl.cumsum(tie, 0) <= ties))
            chosen = keep.to(tl.int32)
            tl.store(out + written + tl.cumsum(chosen, 0) - 1, j + key, mask=keep)
            written += tl.sum(chosen, 0)
            ties = tl.maximum(ties - tl.sum(tie, 0), 0)


CHUNK = 2048
"""Keys of a program."""
LOADED = (8, 512, 16)
"""Entries of a thread, threads and warps of a program that looks through a row."""


def column_sums(call: AttentionCall, rows: Rows, begin: Tensor, until: int) -> Tensor:
    """float32 ``[B, Hkv, n, until]``: see `sums.column_sums`; of keys at or behind `begin`, ``[B, n]``, no sums.

    What stands there is not written, and nobody may read it.
    """
    geometry, (batch, tiles, count) = call.geometry, rows.index.shape
    q, keys = call.q if call.q.stride(-1) == 1 else call.q.contiguous(), Keys.of(call)
    width = q.shape[-1]
    chosen = settings(chip(q.device), block(width), q.element_size())
    pairs = min(chosen.block_m, block(count * call.group))
    together = chosen.block_m // pairs
    groups, parts = cdiv(tiles, together), cdiv(count * call.group, pairs)
    weight = rows.weight.flatten(1)[:, None]
    base = torch.where(weight > 0, rows.lse(call) * LOG2E.value - weight.log2(), torch.inf)
    out = torch.empty(batch, call.kv_heads, tiles, until, dtype=torch.float32, device=q.device)
    enqueue(column_sums_kernel, (batch * call.kv_heads * groups, cdiv(until, CHUNK)),
        q, keys.k, keys.table, keys.scale, rows.index.to(torch.int32).contiguous(), base.contiguous(), begin,
        geometry.starts, out, *strides(q), *keys.strides, begin.stride(0),
        call.softmax_scale * LOG2E.value, call.softcap or 0.0,
        tiles, count, call.kv_heads, call.group, groups, parts, CHUNK, until, geometry.kv_len,
        TILES=together, PAIRS=pairs, PARTS=parts > 1, BLOCK_N=chosen.block_n, D=width, BLOCK_D=block(width),
        SOFTCAP=call.softcap is not None, PAGE=keys.page, PRECISION="ieee", **chosen.options,
    )  # fmt: skip
    return out


def top_columns(sums: Tensor, begin: Tensor, lists: IndexLists, part: slice) -> None:
    """Write the lists of the tiles `part` of ``[B, Hkv, G]``. begin: int64 ``[B, G]``, of all tiles."""
    batch, heads, tiles, width = sums.shape
    each, threads, warps = LOADED
    enqueue(top_columns_kernel, (batch * heads * tiles,),
        sums, begin, lists.counts, lists.offsets, lists.indices, tiles, lists.shape[2], part.start, heads, width,
        N=each, WIDTH=threads, num_warps=warps, **FUSED,
    )  # fmt: skip
