"""Keys and values in 8 bits, for `eight`: what a call's kernel reads, made in two passes over K and V."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparseprefill.kernels.hopper.arguments import Eight
from sparseprefill.kernels.settings import FUSED, cdiv
from sparseprefill.kernels.source import TYPES, Source
from sparseprefill.kernels.steps import stored_rows

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

TILE = tl.constexpr(128)
"""Keys with one factor: a step, and a tile of the mask."""
CHUNK = 1024
"""Keys that one program of the first pass sums."""
LEAST = tl.constexpr(1e-30)
"""Of a factor, so that zeros stay zeros."""
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
"""Of keys and values in shared memory."""


@triton.jit(do_not_specialize=("kv_len",))
def sums_kernel(
    k_ptr, v_ptr, table_ptr, sums_ptr, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, kv_heads, kv_len,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """sums ``[B * Hkv, chunks, 4, D]``: of keys and of values the sum, then the largest and the least value."""
    head = tl.program_id(1)
    dims = tl.arange(0, D)
    keys = tl.zeros([D], tl.float32)
    values = tl.zeros([D], tl.float32)
    largest = tl.full([D], float("-inf"), tl.float32)
    least = tl.full([D], float("inf"), tl.float32)
    b = head // kv_heads
    if PAGE > 0:
        b = 0
    k_ptr += b.to(tl.int64) * stride_kb + (head % kv_heads).to(tl.int64) * stride_kh
    v_ptr += b.to(tl.int64) * stride_vb + (head % kv_heads).to(tl.int64) * stride_vh
    for i in range(0, CHUNK, BLOCK):
        at = tl.program_id(0) * CHUNK + i + tl.arange(0, BLOCK)
        keep = at < kv_len
        k = stored_rows(k_ptr, at, keep, stride_kn, table_ptr, stride_kb, None, TYPE, PAGE, D, D).to(tl.float32)
        v = stored_rows(v_ptr, at, keep, stride_vn, table_ptr, stride_vb, None, TYPE, PAGE, D, D).to(tl.float32)
        keys += tl.sum(k, 0)
        values += tl.sum(v, 0)
        largest = tl.maximum(largest, tl.max(tl.where(keep[:, None], v, float("-inf")), 0))
        least = tl.minimum(least, tl.min(tl.where(keep[:, None], v, float("inf")), 0))
    to = sums_ptr + (head * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * 4 * D + dims
    tl.store(to, keys)
    tl.store(to + D, values)
    tl.store(to + 2 * D, largest)
    tl.store(to + 3 * D, least)


@triton.jit(do_not_specialize=("kv_len", "tiles"))
def quantise_kernel(
    k_ptr, v_ptr, table_ptr, k_mean_ptr, v_mean_ptr, v_scale_ptr, k8_ptr, v8_ptr, scale_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, kv_heads, kv_len, tiles,
    D: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one head. Keys less their mean over the tile's factor, int8 ``[B * Hkv, Nkv, D]``; values
    less their mean over their columns' factors, e4m3 ``[B * Hkv, D, tiles * TILE]``.

    Of 16 keys, place ``4 j + 2 i + n`` holds the one with number ``8 i + 2 j + n`` (i, n < 2; j < 4): the sum of a row's
    products leaves a thread the columns 2 j and 2 j + 1 of every 8, and the next product wants four in a row.
    """
    head = tl.program_id(1)
    tile = tl.program_id(0)
    dims = tl.arange(0, D)
    number = tl.arange(0, TILE)
    b = head // kv_heads
    if PAGE > 0:
        b = 0
    k_ptr += b.to(tl.int64) * stride_kb + (head % kv_heads).to(tl.int64) * stride_kh
    v_ptr += b.to(tl.int64) * stride_vb + (head % kv_heads).to(tl.int64) * stride_vh
    at = tile * TILE + number
    keep = at < kv_len
    k = stored_rows(k_ptr, at, keep, stride_kn, table_ptr, stride_kb, None, TYPE, PAGE, D, D).to(tl.float32)
    k = tl.where(keep[:, None], k - tl.load(k_mean_ptr + head * D + dims)[None, :], 0.0)
    factor = tl.maximum(tl.max(tl.abs(k)), LEAST) / 127.0
    # 1.5 * 2**23 rounds a sum to whole numbers, whose bits are its last ones.
    rounded = (k / factor + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    row = head.to(tl.int64) * kv_len + at
    tl.store(k8_ptr + row[:, None] * D + dims[None, :], rounded, mask=keep[:, None])
    tl.store(scale_ptr + head * tiles + tile, factor)
    at = tile * TILE + number // 16 * 16 + number // 2 % 2 * 8 + number // 4 % 4 * 2 + number % 2
    keep = at < kv_len
    v = stored_rows(v_ptr, at, keep, stride_vn, table_ptr, stride_vb, None, TYPE, PAGE, D, D).to(tl.float32)
    v = tl.where(keep[:, None], v - tl.load(v_mean_ptr + head * D + dims)[None, :], 0.0)
    v = (v / tl.load(v_scale_ptr + head * D + dims)[None, :]).to(tl.float8e4nv)
    line = (head.to(tl.int64) * D + dims) * (tiles * TILE)
    tl.store(v8_ptr + line[:, None] + (tile * TILE + number)[None, :], tl.trans(v))


def eight(call: AttentionCall, exact: Tensor) -> Eight:
    """K and V of a call in 8 bits. exact: int8 ``[B * Hq]``, heads that stay in 16.

    A NaN or an infinity makes a mean of its head NaN, and with it every row of that head, which are then computed again.
    """
    source = Source.of(call)
    batch, heads, length, width = call.geometry.batch, call.kv_heads, call.kv_len, call.q.shape[3]
    options: dict[str, object] = {"device": call.q.device, "dtype": torch.float32}
    tiles, lines = cdiv(length, TILE.value), batch * heads
    sums = torch.empty(lines, cdiv(length, CHUNK), 4, width, **options)  # type: ignore[call-overload]
    given = (source.k, source.v, source.table)
    steps = (*source.strides(source.k), *source.strides(source.v), heads, length)
    constant = {"D": width, "PAGE": source.page, "TYPE": TYPES[call.q.dtype], **FUSED}
    sums_kernel[(sums.shape[1], lines)](*given, sums, *steps, CHUNK=CHUNK, BLOCK=64, num_warps=4, **constant)
    k_mean, v_mean = (sums[:, :, i].sum(1) / length for i in (0, 1))
    apart = torch.maximum(sums[:, :, 2].amax(1) - v_mean, v_mean - sums[:, :, 3].amin(1))
    v_scale = apart.clamp(min=LEAST.value) / 448.0
    k = torch.empty(batch, heads, length, width, dtype=torch.int8, device=call.q.device)
    v = torch.empty(batch, heads, width, tiles * TILE.value, dtype=torch.float8_e4m3fn, device=call.q.device)
    k_scale = torch.empty(lines, tiles, **options)  # type: ignore[call-overload]
    quantise_kernel[(tiles, lines)](
        *given, k_mean, v_mean, v_scale, k, v, k_scale, *steps, tiles, num_warps=8, **constant
    )
    descriptors = _descriptor(k, TILE.value, width), _descriptor(v, width, TILE.value)
    return Eight(*descriptors, k_scale, k_mean, v_scale, v_mean, exact)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns], LAYOUT)
