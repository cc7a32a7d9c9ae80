"""Copies K or V of a request's pages into one tensor, head by head, whatever the layout of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED, cdiv, power_of_two
from sparseprefill.kernels.steps import converted, factor

BLOCK = 32


@triton.jit(do_not_specialize=("length",), do_not_specialize_on_alignment=("table_ptr",))
def gather_pages_kernel(
    x_ptr, table_ptr, out_ptr, scale_ptr, length, stride_page, stride_slot, stride_head,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out ``[heads, length, D]``: BLOCK tokens of one head, each from slot ``token % PAGE`` of page ``table[token // PAGE]``.

    scale_ptr: of the factor on what an fp8 cache holds, or None. Paged caches are vLLM's (Kwon et al., 2023).
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    real = token < length
    page = tl.load(table_ptr + token // PAGE, mask=real, other=0).to(tl.int64)  # [BLOCK]
    source = (page * stride_page + (token % PAGE) * stride_slot + head * stride_head)[:, None] + d
    goal = (head * length + token)[:, None] * D + d
    keep = real[:, None] & (d < D)
    x = tl.load(x_ptr + source, mask=keep)  # [BLOCK, BLOCK_D]
    tl.store(out_ptr + goal, converted(x, factor(scale_ptr), out_ptr.dtype.element_ty), mask=keep)


def gather_pages(x: Tensor, table: Tensor, length: int, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``[1, Hkv, length, D]``, contiguous, in `dtype`. x: k or v of `Pages`; the others as there."""
    _, page, heads, size = x.shape
    out = x.new_empty((1, heads, length, size), dtype=dtype)
    enqueue(gather_pages_kernel, (cdiv(length, BLOCK), heads),
        x, table, out, scale, length, *x.stride()[:3],
        PAGE=page, BLOCK=BLOCK, D=size, BLOCK_D=power_of_two(size), num_warps=4, **FUSED,
    )  # fmt: skip
    return out
