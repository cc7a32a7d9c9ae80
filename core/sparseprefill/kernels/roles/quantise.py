"""Keys and values in 8 bits, for `eight`: what a call's kernel reads, made in two passes over K and V."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.roles.arguments import Eight
from sparseprefill.kernels.settings import FUSED, cdiv
from sparseprefill.kernels.source import TYPES, Source, strides
from sparseprefill.kernels.steps import stored_rows

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


@triton.jit(do_not_specialize=("kv_len", "chunks"))
def means_kernel(
    sums_ptr, k_mean_ptr, v_mean_ptr, v_scale_ptr, v_inverse_ptr, kv_len, chunks, BLOCK: tl.constexpr, D: tl.constexpr
):
    """One program: means and factors ``[B * Hkv, D]`` of a head, from its `sums_kernel`."""
    dims = tl.arange(0, D)
    head = tl.program_id(0).to(tl.int64)
    keys = tl.zeros([D], tl.float32)
    values = tl.zeros([D], tl.float32)
    largest = tl.full([D], float("-inf"), tl.float32)
    least = tl.full([D], float("inf"), tl.float32)
    for i in range(0, chunks, BLOCK):
        chunk = i + tl.arange(0, BLOCK)
        keep = (chunk < chunks)[:, None]
        of = sums_ptr + (head * chunks + chunk)[:, None] * 4 * D + dims[None, :]
        keys += tl.sum(tl.load(of, mask=keep, other=0.0), 0)
        values += tl.sum(tl.load(of + D, mask=keep, other=0.0), 0)
        largest = tl.maximum(largest, tl.max(tl.load(of + 2 * D, mask=keep, other=float("-inf")), 0))
        least = tl.minimum(least, tl.min(tl.load(of + 3 * D, mask=keep, other=float("inf")), 0))
    mean = values / kv_len
    tl.store(k_mean_ptr + head * D + dims, keys / kv_len)
    tl.store(v_mean_ptr + head * D + dims, mean)
    apart = tl.maximum(tl.maximum(largest - mean, mean - least), LEAST)
    # Weights are 448 times as large as they should be, and so are their sums; values over their factor up to 448.
    tl.store(v_scale_ptr + head * D + dims, apart / (448.0 * 448.0))
    tl.store(v_inverse_ptr + head * D + dims, 448.0 * 448.0 / apart)


@triton.jit(do_not_specialize=("first", "blocks"))
def apart_kernel(
    out_ptr, exact_ptr, errors_ptr, beyond_ptr, stride_ob, stride_oh, stride_on, heads, first, bound, blocks,
    SAMPLED: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One program: how far a head's sampled blocks are from exact ``[B * Hq, SAMPLED * BLOCK, D]``, as a share of its norm;
    and whether that is beyond the bound, as a NaN is."""
    bh = tl.program_id(0)
    dims = tl.arange(0, D)
    out_ptr += (bh // heads).to(tl.int64) * stride_ob + (bh % heads).to(tl.int64) * stride_oh
    apart = 0.0
    norm = 0.0
    for i in range(SAMPLED):
        row = first + (2 * i + 1) * blocks // (4 * SAMPLED) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(out_ptr + row.to(tl.int64)[:, None] * stride_on + dims[None, :]).to(tl.float32)
        line = (bh * SAMPLED + i).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(exact_ptr + line[:, None] * D + dims[None, :]).to(tl.float32)
        apart += tl.sum(tl.sum((x - y) * (x - y), 1), 0)
        norm += tl.sum(tl.sum(y * y, 1), 0)
    error = tl.sqrt(apart / tl.maximum(norm, LEAST))
    tl.store(errors_ptr + bh, error)
    tl.store(beyond_ptr + bh, (error <= bound).to(tl.int8) ^ 1)


@triton.jit(do_not_specialize=("kv_len", "tiles"))
def quantise_kernel(
    k_ptr, v_ptr, table_ptr, k_mean_ptr, v_mean_ptr, v_inverse_ptr, k8_ptr, v8_ptr, scale_ptr,
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
    v = (v * (tl.load(v_inverse_ptr + head * D + dims) / 448.0)[None, :]).to(tl.float8e4nv)
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
    steps = (*strides(source.k, source.page), *strides(source.v, source.page), heads, length)
    constant = {"D": width, "PAGE": source.page, "TYPE": TYPES[call.q.dtype], **FUSED}
    enqueue(sums_kernel, (sums.shape[1], lines), *given, sums, *steps, CHUNK=CHUNK, BLOCK=64, num_warps=4, **constant)
    k_mean, v_mean, v_scale, v_inverse = torch.empty(4, lines, width, **options)  # type: ignore[call-overload]
    enqueue(means_kernel, (lines,),
        sums, k_mean, v_mean, v_scale, v_inverse, length, sums.shape[1], BLOCK=16, D=width, num_warps=4,
        **FUSED,
    )  # fmt: skip
    k = torch.empty(batch, heads, length, width, dtype=torch.int8, device=call.q.device)
    v = torch.empty(batch, heads, width, tiles * TILE.value, dtype=torch.float8_e4m3fn, device=call.q.device)
    k_scale = torch.empty(lines, tiles, **options)  # type: ignore[call-overload]
    enqueue(quantise_kernel, (tiles, lines),
        *given, k_mean, v_mean, v_inverse, k, v, k_scale, *steps, tiles, num_warps=8, **constant,
    )  # fmt: skip
    descriptors = _descriptor(k, TILE.value, width), _descriptor(v, width, TILE.value)
    return Eight(*descriptors, k_scale, k_mean, v_scale, v_inverse, v_mean, exact)


def errors_of(
    out: Tensor, exact: Tensor, first: int, blocks: int, sampled: int, block: int, bound: float
) -> tuple[Tensor, Tensor]:
    """float32 ``[B, Hq]``: how far the sampled blocks of out ``[B, Hq, Nq, D]`` are from exact ``[B, Hq, rows, D]``, as a
    share of its norm; and int8 ``[B * Hq]``, 1 where that is beyond the bound. first: row of block 0."""
    batch, heads, _, width = out.shape
    errors = torch.empty(batch, heads, dtype=torch.float32, device=out.device)
    beyond = torch.empty(batch * heads, dtype=torch.int8, device=out.device)
    enqueue(apart_kernel, (batch * heads,),
        out, exact, errors, beyond, *strides(out), heads, first, bound, blocks,
        SAMPLED=sampled, BLOCK=block, D=width, num_warps=8, **FUSED,
    )  # fmt: skip
    return errors, beyond


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns], LAYOUT)
