"""LSE of sampled query rows in every key tile, in one pass over the keys; see `sparseprefill.statistics.by_tile`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.family.chips import chip
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.sampled.mass import settings
from sparseprefill.kernels.settings import block, cdiv
from sparseprefill.kernels.source import Keys, packed, strides
from sparseprefill.kernels.steps import LN2, LOG2E, batch_row, factor, logits, stored_rows
from sparseprefill.mask.samples import KeptKeys

KEYS = 2048
"""Keys of a program, in whole tiles."""
RUNTIME = (
    "q_offset", "kv_len", "count", "kv_heads", "kv_group", "blocks", "columns", "each", "lines", "sixteens", "window",
)  # fmt: skip
UNALIGNED = ("table_ptr", "k_scale_ptr")
BIG = tl.constexpr(1 << 30)


@triton.jit
def _add(m, l, s):  # noqa: E741
    """Running maximum m and sum l [rows] of exponentials, with those of base-2 logits s [rows, keys]."""
    m_new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, l * tl.math.exp2(m - base) + tl.sum(tl.math.exp2(s - base[:, None]), 1)


@triton.jit
def _lse(m, l):  # noqa: E741
    """Natural log; -inf where nothing was summed."""
    return tl.where(m == float("-inf"), float("-inf"), (m + tl.math.log2(tl.where(l == 0.0, 1.0, l))) * LN2)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def row_tiles_kernel(
    q_ptr, k_ptr, table_ptr, k_scale_ptr, rows_ptr, real_ptr, starts_ptr, keys_ptr, line_ptr, every_ptr, kept_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    scale, softcap, q_offset, kv_len, count, kv_heads, kv_group, blocks, columns, each, lines, sixteens, window,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """every, kept ``[B, Hq, n, C]``: LSE of each row over the keys of a tile, and over those that `keys` keeps.

    Online softmax (Milakov and Gimelshein, 2018) begun anew in each key tile. One program: BLOCK_R pairs of a sampled
    row and a query head of one KV head, so that heads share the keys, and `each` key tiles. keys_ptr: bytes
    ``[B, Hq, lines, 16 * sixteens]`` by position on the row's grid, to the end of the last step of the last tile, or
    None; then kept_ptr is not looked at. line_ptr: int64 ``[B, n]``, the line of each row, or None: each has its own.
    """
    z = tl.program_id(0)
    part = z % blocks
    kv = z // blocks % kv_heads
    b = z // blocks // kv_heads
    start, _, _ = batch_row(b, starts_ptr, None, q_offset, 0)
    pair = part * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = pair < count * kv_group
    sample = pair // kv_group
    head = kv * kv_group + pair % kv_group
    place = b.to(tl.int64) * count + sample
    index = tl.load(rows_ptr + place, mask=inside, other=0).to(tl.int32)  # [BLOCK_R]
    real = tl.load(real_ptr + place, mask=inside, other=0) != 0  # [BLOCK_R]
    position = index + q_offset - start
    dims = tl.arange(0, BLOCK_D)
    line = q_ptr + b.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + index.to(tl.int64) * stride_qn
    q = tl.load(
        line[:, None] + dims[None, :], mask=real[:, None] & (dims < D)[None, :], other=0.0
    )  # [BLOCK_R, BLOCK_D]
    k_base = k_ptr + b.to(tl.int64) * stride_kb + kv.to(tl.int64) * stride_kh
    top = tl.max(tl.where(real, position, -1), 0)
    low = tl.min(tl.where(real, position, BIG), 0)
    row = (b * kv_heads * kv_group + head).to(tl.int64) * count + sample  # [BLOCK_R]
    of_keys = row
    if line_ptr is not None:
        line_of = tl.load(line_ptr + place, mask=inside, other=0)  # [BLOCK_R]
        of_keys = (b * kv_heads * kv_group + head).to(tl.int64) * lines + line_of
    k_scale = factor(k_scale_ptr)
    key = tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * each
    for tile in tl.range(first, tl.minimum(first + each, columns)):
        begin = tile * TILE
        stop = tl.minimum(TILE, top + 1 - begin)
        if WINDOW:
            stop = tl.where(begin + TILE + window > low + 1, stop, 0)
        m = tl.full([BLOCK_R], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_R], tl.float32)  # noqa: E741
        m_kept = m
        l_kept = l
        for j in tl.range(0, stop, BLOCK_N):
            at = begin + j + key
            there = (j + key < TILE) & (at + start < kv_len)
            k = stored_rows(
                k_base, at + start, there, stride_kn, table_ptr, stride_kb, k_scale, q.dtype, PAGE, D, BLOCK_D
            )  # [BLOCK_N, BLOCK_D]
            seen = (at[None, :] <= position[:, None]) & real[:, None] & there[None, :]  # [BLOCK_R, BLOCK_N]
            if WINDOW:
                seen = seen & (position[:, None] - at[None, :] < window)
            s = tl.where(seen, logits(q, k, scale, softcap, SOFTCAP, PRECISION), float("-inf"))
            m, l = _add(m, l, s)  # noqa: E741
            if keys_ptr is not None:
                # Rows of whole 16 bytes and a mask that is the same for all keys: few wide loads, not one a byte.
                kept_line = keys_ptr + of_keys * sixteens * 16
                held = tl.load(kept_line[:, None] + at[None, :], mask=inside[:, None], other=0) != 0
                m_kept, l_kept = _add(m_kept, l_kept, tl.where(held, s, float("-inf")))
        tl.store(every_ptr + row * columns + tile, _lse(m, l), mask=inside)
        if keys_ptr is not None:
            tl.store(kept_ptr + row * columns + tile, _lse(m_kept, l_kept), mask=inside)


def tile_lse(
    call: AttentionCall, rows: Tensor, real: Tensor, tile: int, keys: KeptKeys | None
) -> tuple[Tensor, Tensor | None]:
    """float32 ``[B, Hq, n, C]``: LSE in each key tile over all keys, and over those that `keys` keeps, if there are any.

    rows: int64 ``[B, n]``, real: bool ``[B, n]``. A map of keys that ends with a step and is a multiple of 16 wide need
    not be copied. One launch, no host synchronisation.
    """
    geometry, count = call.geometry, rows.shape[1]
    q, k = packed(call.q), Keys.of(call)
    width = q.shape[-1]
    chosen = settings(chip(q.device), block(width), q.element_size())
    block_r = min(chosen.block_m, block(count * call.group))
    block_n = min(chosen.block_n, block(tile))
    columns, each = geometry.tile_columns(tile), max(1, KEYS // tile)
    blocks = cdiv(count * call.group, block_r)
    every = torch.empty(geometry.batch, geometry.heads, count, columns, dtype=torch.float32, device=q.device)
    kept = None if keys is None else torch.empty_like(every)
    behind = -(-((columns - 1) * tile + cdiv(tile, block_n) * block_n) // 16) * 16
    held = line = None
    if keys is not None:
        held, line = keys.map, keys.line
        if held.shape[-1] < behind or held.shape[-1] % 16:
            held = functional.pad(held, (0, max(behind, -(-held.shape[-1] // 16) * 16) - held.shape[-1]))
        held, line = held.contiguous().view(torch.uint8), None if line is None else line.contiguous()
    lines, sixteens = (0, 0) if held is None else (held.shape[2], held.shape[3] // 16)
    enqueue(row_tiles_kernel, (geometry.batch * call.kv_heads * blocks, cdiv(columns, each)),
        q, k.k, k.table, k.scale, rows.contiguous(), real.contiguous().view(torch.uint8), geometry.starts,
        held, line, every, every if kept is None else kept,
        *strides(q), *k.strides, call.softmax_scale * LOG2E.value, call.softcap or 0.0,
        geometry.q_offset, geometry.kv_len, count, call.kv_heads, call.group, blocks, columns, each, lines, sixteens,
        call.geometry.window or 0,
        TILE=tile, BLOCK_R=block_r, BLOCK_N=block_n, D=width, BLOCK_D=block(width),
        WINDOW=call.geometry.window is not None, SOFTCAP=call.softcap is not None, PAGE=k.page, PRECISION="ieee",
        **chosen.options,
    )  # fmt: skip
    return every, kept
