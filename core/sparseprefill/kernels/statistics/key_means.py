"""Mean keys of key tiles, each read once where it stands: in a tensor or in the pages of a cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.source import Keys
from sparseprefill.kernels.steps import batch_row, factor, stored_rows

ROWS = 32
"""Keys that a program loads at once."""


@triton.jit(
    do_not_specialize=("end", "kv_len", "columns", "heads", "kept_columns", "kept"),
    do_not_specialize_on_alignment=("table_ptr", "scale_ptr"),
)  # fmt: skip
def key_means_kernel(
    k_ptr, table_ptr, scale_ptr, starts_ptr, lengths_ptr, kept_ptr, mean_ptr, stride_kb, stride_kh, stride_kn,
    end, kv_len, columns, heads, kept_columns, kept,
    TILE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """mean ``[batch, heads, columns, D]``: average pooling of keys, as FlexPrefill's Algorithm 4 takes it.

    One program: one tile of one KV head, ROWS keys at a time; of the first `kept` tiles a copy of what is known of them,
    kept ``[batch, heads, kept_columns, D]``. end: index among the keys behind the call's last query.
    """
    column, bh = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    mean_ptr += (bh.to(tl.int64) * columns + column) * D
    if column < kept:
        known = tl.load(kept_ptr + (bh.to(tl.int64) * kept_columns + column) * D + dims, mask=dims < D, other=0.0)
        tl.store(mean_ptr + dims, known, mask=dims < D)  # [BLOCK_D]
    else:
        b, h = bh // heads, bh % heads
        start, length, _ = batch_row(b, starts_ptr, lengths_ptr, 0, kv_len)
        low = column * TILE
        top = tl.minimum(tl.minimum(low + TILE, end - start), length)
        k_base = k_ptr + b.to(tl.int64) * stride_kb + h.to(tl.int64) * stride_kh
        scale = factor(scale_ptr)
        total = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for row in tl.range(low, low + TILE, ROWS):
            at = row + tl.arange(0, ROWS)
            k = stored_rows(
                k_base, at + start, at < top, stride_kn, table_ptr, stride_kb, scale, TYPE, PAGE, D, BLOCK_D, True
            )  # [ROWS, BLOCK_D]
            total += k.to(tl.float32)
        mean = tl.sum(total, 0) / tl.maximum(top - low, 1).to(tl.float32)
        tl.store(mean_ptr + dims, mean, mask=dims < D)


def key_means(call: AttentionCall, tile: int, kept: Tensor | None = None, tiles: int = 0) -> Tensor:
    """float32 ``[B, Hkv, C, D]``: see `pooled.key_tile_mean`, for calls of all types but float64.

    kept: the same of an earlier call of the request, contiguous, whose first `tiles` tiles are taken as they are.
    """
    geometry, keys = call.geometry, Keys.of(call)
    columns, width = geometry.tile_columns(tile), call.q.shape[3]
    # A float32 key that is scaled must round before it is added, as its copy does: there is no other product here.
    fused = {**FUSED, "enable_fp_fusion": keys.scale is None}
    mean = torch.empty(geometry.batch, call.kv_heads, columns, width, dtype=torch.float32, device=geometry.device)
    enqueue(key_means_kernel, (columns, geometry.batch * call.kv_heads),
        keys.k, keys.table, keys.scale, geometry.starts, geometry.lengths, mean if kept is None else kept, mean,
        *keys.strides, geometry.q_offset + geometry.q_len, geometry.kv_len, columns, call.kv_heads,
        columns if kept is None else kept.shape[2], tiles,
        TILE=tile, ROWS=ROWS, D=width, BLOCK_D=triton.next_power_of_2(width), num_warps=4, **keys.flags,
        **fused,
    )  # fmt: skip
    return mean
