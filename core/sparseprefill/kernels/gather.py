"""Copies K, V or both of a request's pages into one tensor, head by head, whatever the layout of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED, cdiv, power_of_two
from sparseprefill.kernels.steps import converted, factor

BLOCK = 32


@triton.jit
def _copy(
    x_ptr, table_ptr, out_ptr, scale_ptr, length, stride_page, stride_slot, stride_head,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one head, each from slot ``token % PAGE`` of page ``table[token // PAGE]``."""
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


@triton.jit(do_not_specialize=("length",), do_not_specialize_on_alignment=("table_ptr",))
def gather_pages_kernel(
    k_ptr, v_ptr, table_ptr, k_out_ptr, v_out_ptr, k_scale_ptr, v_scale_ptr, length,
    stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """k_out ``[heads, length, D]``, and v_out ``[heads, length, V]`` by the other half of the programs, where there is v.

    k_scale_ptr, v_scale_ptr: of the factors on what an fp8 cache holds, or None. Paged caches are vLLM's (Kwon et al.,
    2023).
    """
    if tl.program_id(2) == 0:
        _copy(
            k_ptr, table_ptr, k_out_ptr, k_scale_ptr, length, stride_kp, stride_ks, stride_kh, PAGE, BLOCK, D, BLOCK_D
        )
    elif v_ptr is not None:
        _copy(
            v_ptr, table_ptr, v_out_ptr, v_scale_ptr, length, stride_vp, stride_vs, stride_vh, PAGE, BLOCK, V, BLOCK_V
        )


def gather_pages(
    given: Sequence[Tensor], table: Tensor, length: int, scales: Sequence[Tensor | None], dtype: torch.dtype
) -> list[Tensor]:
    """``[1, Hkv, length, D]`` of each, contiguous, in `dtype`, from one launch. given: k, v or both of `Pages`; the others
    as there."""
    page, heads = given[0].shape[1:3]
    made = [x.new_empty((1, heads, length, x.shape[3]), dtype=dtype) for x in given]
    first, last = given[0], given[-1]
    v, v_out, v_scale = (None, None, None) if len(given) == 1 else (last, made[1], scales[1])
    d, width = first.shape[3], last.shape[3]
    enqueue(gather_pages_kernel, (cdiv(length, BLOCK), heads, len(given)),
        first, v, table, made[0], v_out, scales[0], v_scale, length, *first.stride()[:3], *last.stride()[:3],
        PAGE=page, BLOCK=BLOCK, D=d, BLOCK_D=power_of_two(d), V=width, BLOCK_V=power_of_two(width),
        num_warps=4, **FUSED,
    )  # fmt: skip
    return made
