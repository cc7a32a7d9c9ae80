"""Copies a request's pages into one tensor, head by head: one pass over K and V, whatever the layout of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32


@triton.jit(do_not_specialize=("length",), do_not_specialize_on_alignment=("table_ptr",))
def gather_pages_kernel(
    k_ptr, v_ptr, table_ptr, k_out_ptr, v_out_ptr, k_scale_ptr, v_scale_ptr,
    length, stride_page, stride_slot, stride_head,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    real = token < length
    page = tl.load(table_ptr + token // PAGE, mask=real, other=0).to(tl.int64)
    source = (page * stride_page + (token % PAGE) * stride_slot + head * stride_head)[:, None] + d
    goal = (head * length + token)[:, None] * D + d
    keep = real[:, None] & (d < D)
    k = tl.load(k_ptr + source, mask=keep)
    v = tl.load(v_ptr + source, mask=keep)
    if SCALED:
        k = k.to(tl.float32) * tl.load(k_scale_ptr)
        v = v.to(tl.float32) * tl.load(v_scale_ptr)
    tl.store(k_out_ptr + goal, k.to(k_out_ptr.dtype.element_ty), mask=keep)
    tl.store(v_out_ptr + goal, v.to(v_out_ptr.dtype.element_ty), mask=keep)


def gather_pages(
    k: Tensor, v: Tensor, table: Tensor, length: int, scales: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``[1, Hkv, length, D]`` each, contiguous, in `dtype`. The arguments are those of `Pages`."""
    _, page, heads, size = k.shape
    out = k.new_empty((2, 1, heads, length, size), dtype=dtype)
    k_scale, v_scale = (None, None) if scales is None else scales
    gather_pages_kernel[(triton.cdiv(length, BLOCK), heads)](
        *(k, v, table, out[0], out[1], k_scale, v_scale),
        *(length, k.stride(0), k.stride(1), k.stride(2)),
        PAGE=page,
        BLOCK=BLOCK,
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
        SCALED=scales is not None,
        num_warps=4,
    )
    return out[0], out[1]
