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

BLOCK_N = 64
COLUMNS = 64  # pooled queries that one program scores at once


@triton.jit
def _pooled(pooled_ptr, anchor_ptr, rows, real, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr):
    """Pooled queries [C, BLOCK_D] in three parts of the keys' dtype, which keep float32 accuracy, and anchors [C]."""
    pooled = load_rows(pooled_ptr, rows, real, D, D, BLOCK_D)
    anchor = tl.load(anchor_ptr + rows, mask=real, other=0.0)
    high = pooled.to(DTYPE)
    rest = pooled - high.to(tl.float32)
    middle = rest.to(DTYPE)
    return tl.trans(high), tl.trans(middle), tl.trans((rest - middle.to(tl.float32)).to(DTYPE)), anchor


@triton.jit
def _near(
    k, high, middle, low, anchor, real, scale, softcap, theta,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[N, C] int32: which keys come near the anchor of which query block (eq. 2)."""
    if k.dtype == tl.float32:
        s = tl.dot(k, high, input_precision=PRECISION)
    else:
        s = tl.dot(k, high, tl.dot(k, middle, tl.dot(k, low)))
    s = s * scale
    if SOFTCAP:
        s = (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0) * softcap
    return (((anchor[None, :] - s > theta) == 0) & real[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=("q_offset", "kv_len", "block_rows", "group_rows", "init", "heads", "kv_group"))
def identify_stripes_kernel(
    k_ptr, pooled_ptr, anchor_ptr, starts_ptr, counts_ptr, offsets_ptr, indices_ptr,
    stride_kb, stride_kh, stride_kn,
    scale, softcap, theta, q_offset, kv_len, block_rows, group_rows, init, heads, kv_group,
    BLOCK: tl.constexpr, STEP: tl.constexpr, STEP_P: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_STARTS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one group of one batch row, for HEADS query heads that share a KV head and so one load of keys."""
    row = group_rows - 1 - tl.program_id(0)
    parts = tl.cdiv(kv_group, HEADS)
    b, hk, part = tl.program_id(1), tl.program_id(2) // parts, tl.program_id(2) % parts
    start = 0
    if HAS_STARTS:
        start = tl.load(starts_ptr + b)
    first = q_offset - start
    group = floor_div(first, BLOCK * STEP) + row
    end = group * BLOCK * STEP
    first_block = group * STEP - floor_div(first, BLOCK)
    column = tl.arange(0, HEADS * STEP_P)
    member, number = part * HEADS + column // STEP_P, column % STEP_P
    k_base = k_ptr + b.to(tl.int64) * stride_kb + hk.to(tl.int64) * stride_kh
    head = b.to(tl.int64) * heads + hk * kv_group
    mine = part * HEADS + tl.arange(0, HEADS)
    lists = (head + mine) * group_rows + row
    place = tl.load(offsets_ptr + lists, mask=mine < kv_group, other=0)
    count = tl.zeros([HEADS], tl.int32)
    # Groups of up to STEP_P blocks (the usual case) keep their pooled queries on chip.
    once: tl.constexpr = STEP <= STEP_P
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    blocks = first_block + number
    real = (number < STEP) & (blocks >= 0) & (blocks < block_rows) & (member < kv_group)
    rows = (head + member) * block_rows + blocks
    high, middle, low, anchor = _pooled(pooled_ptr, anchor_ptr, rows, real, D, BLOCK_D, dtype)
    for key in tl.range(init, end, BLOCK_N):
        at = key + tl.arange(0, BLOCK_N)
        k = load_rows(k_base, at + start, at + start < kv_len, stride_kn, D, BLOCK_D)
        near = _near(k, high, middle, low, anchor, real, scale, softcap, theta, SOFTCAP, PRECISION)
        if not once:
            for chunk in range(STEP_P, STEP, STEP_P):
                more = (
                    (member < kv_group)
                    & (blocks + chunk >= 0)
                    & (chunk + number < STEP)
                    & (blocks + chunk < block_rows)
                )
                h, m, n, a = _pooled(pooled_ptr, anchor_ptr, rows + chunk, more, D, BLOCK_D, dtype)
                near = tl.maximum(near, _near(k, h, m, n, a, more, scale, softcap, theta, SOFTCAP, PRECISION))
        keep = tl.max(tl.reshape(near, [BLOCK_N, HEADS, STEP_P]), 2)
        keep = tl.where((at < end)[:, None], keep, 0)
        order = tl.cumsum(keep, 0)
        slot = (place + count)[None, :] + order - 1
        tl.store(indices_ptr + slot, tl.broadcast_to(at[:, None], [BLOCK_N, HEADS]), mask=keep > 0)
        count += tl.sum(keep, 0)
    tl.store(counts_ptr + lists, count, mask=mine < kv_group)


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
    step_p = min(triton.next_power_of_2(regions.step), COLUMNS)
    shared = min(triton.next_power_of_2(call.group), COLUMNS // step_p)
    step_p = max(step_p, 16 // shared)
    grid = (groups, batch, k.shape[1] * triton.cdiv(call.group, shared))
    identify_stripes_kernel[grid](
        k, pooled.contiguous(), anchor.contiguous(), geometry.starts, counts, offsets, indices,
        k.stride(0) if batch > 1 else 0, k.stride(1), k.stride(2),
        call.softmax_scale, call.softcap or 0.0, theta, geometry.q_offset, geometry.kv_len,
        geometry.tile_rows(regions.block), groups, regions.init_tokens, heads, call.group,
        BLOCK=regions.block, STEP=regions.step, STEP_P=step_p, HEADS=shared,
        BLOCK_N=BLOCK_N, D=width, BLOCK_D=triton.next_power_of_2(width),
        HAS_STARTS=geometry.starts is not None, SOFTCAP=call.softcap is not None, PRECISION="ieee",
        num_warps=4, num_stages=3 if k.element_size() == 2 else 2,
    )  # fmt: skip
    return IndexLists(counts, offsets, indices)


def _rooms(geometry: Geometry, regions: Regions) -> list[int]:
    """Most keys that each group of the call can select; an upper bound for rows that start later."""
    first = geometry.q_offset // regions.group
    last = range(first, first + geometry.tile_rows(regions.group))
    return [min(max(group * regions.group - regions.init_tokens, 0), geometry.kv_len) for group in last]
