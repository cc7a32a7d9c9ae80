"""Distance of the softmax of pooled products from the true attention: a Triton kernel and its launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.launch import enqueue
from sparseprefill.kernels.settings import FUSED
from sparseprefill.kernels.statistics.distance import js_distance, js_terms, seen_blocks
from sparseprefill.kernels.statistics.softmax import row_level, row_logits

TINY = tl.constexpr(1.1754943508222875e-38)
SQRT_LN2 = tl.constexpr(0.8325546111576977)


@triton.jit(do_not_specialize=("q_offset", "q_len", "kv_len", "count", "columns", "window", "heads"))
def distance_kernel(
    products_ptr, true_ptr, far_ptr, starts_ptr, lengths_ptr, scale, softcap,
    q_offset, q_len, kv_len, count, columns, window, heads,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """far ``[batch * heads]``: Jensen-Shannon distance, in nats, by which a head takes its pattern (Algorithm 2).

    Of the softmax of products ``[batch * heads, columns]``, the pooled estimate, from the true mass, which is made to
    add up to 1. One program: one head.
    """
    bh = tl.program_id(0)
    begin, last = seen_blocks(
        bh // heads, starts_ptr, lengths_ptr, q_offset, q_len, kv_len, count, window, BLOCK, WINDOW
    )  # fmt: skip
    end = tl.minimum(last + 1, columns)
    products, true = products_ptr + bh.to(tl.int64) * columns, true_ptr + bh.to(tl.int64) * columns
    level, share = row_level(products, begin, end, scale, softcap, SOFTCAP, False, WIDTH)
    mass = tl.zeros([WIDTH], tl.float32)
    for at in tl.range(0, columns, WIDTH):
        c = at + tl.arange(0, WIDTH)
        mass += tl.load(true + c, mask=c < columns, other=0.0)  # [WIDTH]
    whole = tl.maximum(tl.sum(mass, 0), TINY)
    total = tl.zeros([WIDTH], tl.float32)
    for at in tl.range(0, columns, WIDTH):
        c = at + tl.arange(0, WIDTH)
        x, _ = row_logits(products, c, begin, end, scale, softcap, SOFTCAP, False)
        estimate = tl.math.exp2(x - level) * share
        total += js_terms(estimate, tl.load(true + c, mask=c < columns, other=0.0) / whole)
    tl.store(far_ptr + bh, js_distance(tl.sum(total, 0)) * SQRT_LN2)  # to nats


def distance(call: AttentionCall, products: Tensor, true: Tensor, count: int, block: int) -> Tensor:
    """float32 ``[B, Hq]``, in nats, of ``[B, Hq, C]`` each. count: sampled queries, the call's last ones."""
    geometry, (batch, heads, columns) = call.geometry, products.shape
    far = torch.empty(batch, heads, dtype=torch.float32, device=products.device)
    enqueue(distance_kernel, (batch * heads,),
        products, true.contiguous(), far, geometry.starts, geometry.lengths, call.softmax_scale, call.softcap or 0.0,
        geometry.q_offset, geometry.q_len, geometry.kv_len, count, columns, geometry.window or 0, heads,
        BLOCK=block, WIDTH=1024, WINDOW=geometry.window is not None, SOFTCAP=call.softcap is not None, num_warps=8,
        **FUSED,
    )  # fmt: skip
    return far
