"""Alg. 2 as one Triton launch: scores, threshold and compaction of a group's keys, no score matrix in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.steps import floor_div, load_rows
from sparseprefill.lists import IndexLists

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.geometry import Geometry

    from .regions import Regions

BLOCK_N = 128


@triton.jit
def _score(k, pooled, PRECISION: tl.constexpr):
    """[N, S] float32 product; float32 queries in three parts of k's dtype keep float32 accuracy on tensor cores."""
    if k.dtype == tl.float32:
        return tl.dot(k, tl.trans(pooled), input_precision=PRECISION)
    high = pooled.to(k.dtype)
    rest = pooled - high.to(tl.float32)
    middle = rest.to(k.dtype)
    low = (rest - middle.to(tl.float32)).to(k.dtype)
    s = tl.dot(k, tl.trans(low))
    s = tl.dot(k, tl.trans(middle), s)
    return tl.dot(k, tl.trans(high), s)


@triton.jit(do_not_specialize=("q_offset", "kv_len", "block_rows", "group_rows", "init", "heads"))
def identify_stripes_kernel(
    k_ptr, pooled_ptr, anchor_ptr, starts_ptr, counts_ptr, offsets_ptr, indices_ptr,
    stride_kb, stride_kh, stride_kn,
    scale, softcap, theta, q_offset, kv_len, block_rows, group_rows, init, heads,
    BLOCK: tl.constexpr, STEP: tl.constexpr, STEP_P: tl.constexpr, KV_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_STARTS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = group_rows - 1 - tl.program_id(0)
    bh = tl.program_id(1)
    b, h = bh // heads, bh % heads
    start = 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + b)
    first = q_offset - start
    group = floor_div(first, BLOCK * STEP) + row
    end = group * BLOCK * STEP
    blocks = group * STEP - floor_div(first, BLOCK) + tl.arange(0, STEP_P)
    real = (tl.arange(0, STEP_P) < STEP) & (blocks >= 0) & (blocks < block_rows)
    base = bh.to(tl.int64) * block_rows
    pooled = load_rows(pooled_ptr + base * D, blocks, real, D, D, BLOCK_D)  # [STEP_P, BLOCK_D]
    anchor = tl.load(anchor_ptr + base + blocks, mask=real, other=0.0)
    k_base = k_ptr + b.to(tl.int64) * stride_kb + (h // KV_GROUP).to(tl.int64) * stride_kh
    row_of_lists = bh.to(tl.int64) * group_rows + row
    out_ptr = indices_ptr + tl.load(offsets_ptr + row_of_lists)
    count = 0
    for key in tl.range(init, end, BLOCK_N):
        at = key + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, at + start, at + start < kv_len, stride_kn, D, BLOCK_D)
        s = _score(k, pooled, PRECISION) * scale
        if SOFTCAP:
            s = (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0) * softcap
        near = ((anchor[None, :] - s > theta) == 0) & real[None, :]
        keep = (tl.max(near.to(tl.int32), 1) > 0) & (at < end)
        order = tl.cumsum(keep.to(tl.int32), 0)
        tl.store(out_ptr + count + order - 1, at, mask=keep)
        count += tl.sum(keep.to(tl.int32), 0)
    tl.store(counts_ptr + row_of_lists, count)


def stripes(call: AttentionCall, regions: Regions, pooled: Tensor, anchor: Tensor, theta: float) -> IndexLists:
    """See `identify.stripes`. Lists have room for every candidate key, so nothing is counted on the host."""
    geometry = call.geometry
    batch, heads = geometry.batch, geometry.heads
    rooms = _rooms(geometry, regions)
    groups = len(rooms)
    ends = torch.tensor([0, *rooms[:-1]], dtype=torch.int64).cumsum(0)
    total = sum(rooms)
    offsets = (torch.arange(batch * heads)[:, None] * total + ends).view(batch, heads, groups)
    offsets = offsets.to(geometry.device, non_blocking=True)
    counts = torch.empty(batch, heads, groups, dtype=torch.int32, device=geometry.device)
    indices = torch.empty(max(1, batch * heads * total), dtype=torch.int32, device=geometry.device)
    k = call.k if call.k.stride(-1) == 1 else call.k.contiguous()
    width = k.shape[-1]
    identify_stripes_kernel[(groups, batch * heads)](
        k, pooled.contiguous(), anchor.contiguous(), geometry.starts, counts, offsets, indices,
        k.stride(0) if batch > 1 else 0, k.stride(1), k.stride(2),
        call.softmax_scale, call.softcap or 0.0, theta, geometry.q_offset, geometry.kv_len,
        geometry.tile_rows(regions.block), groups, regions.init_tokens, heads,
        BLOCK=regions.block, STEP=regions.step, STEP_P=max(16, triton.next_power_of_2(regions.step)),
        KV_GROUP=call.group, BLOCK_N=BLOCK_N, D=width, BLOCK_D=triton.next_power_of_2(width),
        HAS_STARTS=geometry.starts is not None, SOFTCAP=call.softcap is not None, PRECISION="ieee",
        num_warps=4, num_stages=3 if k.element_size() == 2 else 2,
    )  # fmt: skip
    return IndexLists(counts, offsets, indices)


def _rooms(geometry: Geometry, regions: Regions) -> list[int]:
    """Most keys that each group of the call can select; an upper bound for rows that start later."""
    first = geometry.q_offset // regions.group
    last = range(first, first + geometry.tile_rows(regions.group))
    return [min(max(group * regions.group - regions.init_tokens, 0), geometry.kv_len) for group in last]
