"""The largest norm in each pool of values, each read once where it stands: in a tensor or in the pages of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.kernels.settings import FUSED, cdiv
from sparseprefill.kernels.source import Keys
from sparseprefill.kernels.steps import batch_row, factor, stored_rows

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

ROWS = 64
"""Values that a program loads at once, unless one pool has more."""


@triton.jit(
    do_not_specialize=("kv_len", "pools", "heads", "kept_pools", "kept"),
    do_not_specialize_on_alignment=("table_ptr", "scale_ptr"),
)  # fmt: skip
def value_norms_kernel(
    v_ptr, table_ptr, scale_ptr, starts_ptr, lengths_ptr, kept_ptr, norm_ptr, stride_vb, stride_vh, stride_vn,
    kv_len, pools, heads, kept_pools, kept,
    POOL: tl.constexpr, POOL_P: tl.constexpr, POOLS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """norm ``[batch, heads, pools]``: the largest 2-norm of POOL values (Stem, "Output-Aware Metric"); inf for NaN.

    One program: POOLS pools of one KV head; of the first `kept` pools what is known of them, kept
    ``[batch, heads, kept_pools]``. POOL_P: a power of two that holds a pool.
    """
    bh = tl.program_id(1)
    pool = tl.program_id(0) * POOLS + tl.arange(0, POOLS)  # [POOLS]
    norm_ptr += bh.to(tl.int64) * pools
    old = tl.load(kept_ptr + bh.to(tl.int64) * kept_pools + pool, mask=pool < kept, other=0.0)  # [POOLS]
    if (tl.program_id(0) + 1) * POOLS <= kept:
        tl.store(norm_ptr + pool, old, mask=pool < pools)
    else:
        b, h = bh // heads, bh % heads
        start, length, _ = batch_row(b, starts_ptr, lengths_ptr, 0, kv_len)
        row = tl.arange(0, POOLS * POOL_P)
        place = row % POOL_P
        at = (tl.program_id(0) * POOLS + row // POOL_P) * POOL + place
        real = (place < POOL) & (at < length) & (at + start < kv_len)
        v_base = v_ptr + b.to(tl.int64) * stride_vb + h.to(tl.int64) * stride_vh
        v = stored_rows(
            v_base, at + start, real, stride_vn, table_ptr, stride_vb, factor(scale_ptr), TYPE, PAGE, D, BLOCK_D, True
        ).to(tl.float32)  # [POOLS * POOL_P, BLOCK_D]
        norm = tl.sqrt(tl.sum(v * v, 1))  # [POOLS * POOL_P]
        norm = tl.where(norm == norm, norm, float("inf"))
        largest = tl.max(tl.reshape(norm, [POOLS, POOL_P]), 1)  # [POOLS]
        tl.store(norm_ptr + pool, tl.where(pool < kept, old, largest), mask=pool < pools)


def value_norms(call: AttentionCall, pool: int, kept: Tensor | None = None, pools: int = 0) -> Tensor:
    """float32 ``[B, Hkv, ceil(Nkv / pool)]`` on each row's grid, for calls of all types but float64; inf for NaN.

    kept: the same of an earlier call of the request, contiguous, whose first `pools` entries are taken as they are.
    Values in pages stay there.
    """
    geometry, values = call.geometry, Keys.of_values(call)
    count, width, block = geometry.tile_columns(pool), call.value_dim, triton.next_power_of_2(pool)
    norms = torch.empty(geometry.batch, call.kv_heads, count, dtype=torch.float32, device=geometry.device)
    together = max(1, ROWS // block)
    value_norms_kernel[(cdiv(count, together), geometry.batch * call.kv_heads)](
        values.k, values.table, values.scale, geometry.starts, geometry.lengths, norms if kept is None else kept, norms,
        *values.strides, geometry.kv_len, count, call.kv_heads, count if kept is None else kept.shape[2], pools,
        POOL=pool, POOL_P=block, POOLS=together, D=width, BLOCK_D=triton.next_power_of_2(width), num_warps=4,
        **values.flags, **FUSED,
    )  # fmt: skip
    return norms
